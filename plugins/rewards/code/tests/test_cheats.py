"""Programs that want the reward without the answer get none, in each sandbox; the right program gets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from groups import fenced, group, score
from rlhf.types import RewardResult

NEEDLE = "needle-73121"
TESTS = [
    {"function": "add", "args": [2, 3], "expected": 5},
    {"function": "add", "args": [10, -4], "expected": 6},
    {"function": "add", "args": ["needle", "-73121"], "expected": NEEDLE},
]
ASSERTIONS = [
    "assert add(2, 3) == 5",
    "assert all(map(lambda pair: add(*pair) == 6, [(10, -4)]))",
    f"result = add('needle', '-73121')\nassert result == {NEEDLE!r} and isinstance(result, str), 'no needle'",
]
STDIN = [{"input": "2 3\n", "output": "5\n"}, {"input": "10 -4\n", "output": "6\n"}]

SEARCH = """
import gc, sys
def look(found, depth=0):
    want = "needle-" + str(73000 + 121)
    frame = sys._getframe().f_back
    seen, todo = set(), [frame.f_back, sys.argv, sys.modules, gc.get_objects(), sys.stdin.read()]
    while frame:
        todo += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    while todo and len(seen) < 200000:
        one = todo.pop()
        if id(one) in seen: continue
        seen.add(id(one))
        if type(one) is str and want in one and one is not want: found.append(one)
        if type(one) is bytes and want.encode() in one: found.append(one)
        if isinstance(one, dict): todo += list(one.values())
        elif isinstance(one, (list, tuple, set)): todo += list(one)
def add(a, b):
    found = []
    look(found)
    return "needle-" + str(73000 + 121) if found else None
"""
FRAMES = """
import os, sys
frame = sys._getframe()
while "nonce" not in frame.f_locals: frame = frame.f_back
nonce = frame.f_locals["nonce"]
ANSWERS = [b"%s %d = %s\\n" % (nonce, i, v) for i in range(3) for v in (b"5", b"6", b'"needle-73121"')]
"""
CALLS = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "os._exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "equal to everything": (
        "class All:\n    __eq__ = lambda s, o: True\n    __hash__ = lambda s: 5\n    __repr__ = lambda s: '5'\n"
        "def add(a, b): return All()"
    ),
    "a subclass of int": "class All(int):\n    __eq__ = lambda s, o: True\ndef add(a, b): return All(0)",
    "a subclass of str": "class All(str):\n    __eq__ = lambda s, o: True\ndef add(a, b): return All('x')",
    "a subclass of dict": "class All(dict):\n    __eq__ = lambda s, o: True\ndef add(a, b): return All()",
    "a bool for an int": "def add(a, b): return True",
    "peeking at frames": SEARCH,
    "atexit": "import atexit, os\natexit.register(lambda: [os.write(f, b'passed\\n') for f in range(9)])",
    "printing the verdict": "print('passed', flush=True)\nprint({'passed': 3, 'verdicts': ['passed'] * 3}, flush=True)",
    "every answer at once, with the nonce": FRAMES
    + "for fd in range(3, 9):\n    try: os.write(fd, b''.join(ANSWERS))\n    except OSError: pass\n",
    "every answer at once, then exit": FRAMES
    + "for fd in range(3, 9):\n    try: os.write(fd, b''.join(ANSWERS))\n    except OSError: pass\nos._exit(0)",
    "patched builtins": (
        "import builtins, json\nbuiltins.type = lambda o: int\nbuiltins.isinstance = lambda *a: True\n"
        "json.loads = lambda *a, **k: 5\nbuiltins.eval = lambda *a: True\ndef add(a, b): return object()"
    ),
    "patched driver": (
        "import sys\nframe = sys._getframe().f_back\n"
        "sys.modules['_json'].encode_basestring_ascii = lambda s: '5'\nsys.exit = lambda *a: None\n"
        "frame.f_globals['_main'] = lambda: None\ndef add(a, b): return None"
    ),
    "reading the tests": (
        "import os, sys\ndef add(a, b):\n    for top in ('.', '/', '/tmp', '/work', '/home', '/root', '/proc/1/fd'):\n"
        "        try:\n            for name in os.listdir(top): return open(os.path.join(top, name)).read()\n"
        "        except OSError: pass\n"
    ),
}
ASSERTED = {
    **CALLS,
    "the end of a loop": "def add(a, b): raise StopIteration",
    "an exception that a test may expect": "def add(a, b): raise AssertionError",
    "nodes of another kind": "def add(a, b): return add\n"
    + FRAMES
    + "frame.f_locals['nodes']['pack'] = lambda *a: [('_Test', 1, 0)]",
    "nodes without an end": "def add(a, b):\n    a = []\n    a.append(a)\n    return a",
    "an answer that is deep": FRAMES + "for n in range(3):\n    for fd in range(3, 9):\n"
    "        try: os.write(fd, b'%s %d = %s\\n' % (nonce, n, b'[' * 30000))\n        except OSError: pass\nos._exit(0)",
    "patched assertions": (
        "import builtins, sys\nbuiltins.AssertionError = type('Never', (Exception,), {})\n"
        "builtins.all = builtins.map = builtins.isinstance = lambda *a: True\n"
        "class tests:\n    __eq__ = lambda s, o: True\nsys.modules['tests'] = tests()\ndef add(a, b): return tests()"
    ),
}
SCRIPTS = {
    "exits early": "import sys\nsys.exit(0)",
    "status 0": "import os\nos._exit(0)",
    "prints the verdict": "print('passed')\nprint('OK')",
    "prints its input": "import sys\nprint(sys.stdin.read())",
    "reads the tests": "import os\nprint(sorted(os.listdir('.')), os.environ.get('EXPECTED'))",
    "right answer, then a crash": "print(sum(map(int, input().split())))\nraise ValueError('late')",
    "right answer, with status 1": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(1)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "kills all processes": "import os\nos.kill(-1, 9)",
}


@pytest.mark.parametrize("partial", [False, True])
def test_the_right_program_gets_the_reward(code_reward, partial: bool) -> None:
    reward = code_reward(partial=partial)
    result = score(reward, TESTS, "def add(a, b):\n    print('passed')\n    return a + b")
    assert (result.value, result.info["passed"], result.info["verdicts"]) == (1.0, 3, ["passed"] * 3)
    result = score(reward, ASSERTIONS, "def add(a, b):\n    print('passed')\n    return a + b")
    assert (result.value, result.info["verdicts"]) == (1.0, ["passed"] * 3), result.info
    result = score(reward, STDIN, "print(sum(map(int, input().split())))")
    assert (result.value, result.info["verdicts"]) == (1.0, ["passed"] * 2)


def test_a_part_of_the_tests(code_reward) -> None:
    program = "def add(a, b): return abs(a) + abs(b)"
    result = score(code_reward(partial=True), TESTS[:2], program)
    assert (result.value, result.info["verdicts"]) == (0.5, ["passed", "wrong"])
    assert result.info["failed"] == "test 1: add() returned 14"
    assert score(code_reward(), TESTS[:2], program).value == 0.0


@pytest.mark.parametrize(
    ("cheats", "tests"),
    [(CALLS, TESTS), (SCRIPTS, STDIN), (ASSERTED, ASSERTIONS)],
    ids=["calls", "scripts", "assertions"],
)
def test_no_cheat_is_accepted(code_reward, cheats: dict[str, str], tests: list[Any]) -> None:
    reward = code_reward(partial=True)

    async def all_of_them() -> list[RewardResult]:
        groups = [group(tests, fenced(cheat)) for cheat in cheats.values()]
        return [result for (result,) in await asyncio.gather(*map(reward.score, groups))]

    results = dict(zip(cheats, asyncio.run(all_of_them()), strict=True))
    assert {name: result for name, result in results.items() if result.value != 0 or result.info["passed"]} == {}
    assert all(result.info["program"] for result in results.values())


def test_the_search_would_find_what_is_inside(code_reward) -> None:
    """The search of the frames finds an argument, so that it would find an expected value."""
    tests = [{"function": "add", "args": [NEEDLE, ""], "expected": NEEDLE}]
    assert score(code_reward(), tests, SEARCH).value == 1.0
