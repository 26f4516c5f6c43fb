"""Assertions of published sets: right programs pass, wrong ones fail, and rows that no program can pass are refused."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest
from groups import fenced, group, score
from rlhf.errors import RewardError
from rlhf_plugin_code import assertions
from rlhf_plugin_code.values import pack, unpack

SETUP = {"test_setup_code": "LIMIT = 1e-6", "test_imports": ["import math"]}
PROMPT = 'import math\n\ndef double(x: int) -> int:\n    return 2 * x\n\ndef half(x: int):\n    """x / 2"""\n'
CHECK = """
METADATA = {}
def check(candidate):
    import random
    assert True, "a constant is no test"
    assert candidate(4) == 2
    for _ in range(30):
        x = random.randint(0, 1000)
        y = candidate(double(x))
        assert y == x
    result = candidate(6)
    assert result == 3 and candidate(candidate(16)) == 4
"""
LISTS = """
class Node:
    def __init__(self, val=0, next=None):
        self.val, self.next = val, next
def nodes(values):
    head = None
    for value in reversed(values):
        head = Node(value, head)
    return head
def same(a, b):
    while a and b and a.val == b.val: a, b = a.next, b.next
    return a is b is None
"""
REVERSED = (
    "class Solution:\n    def turn(self, head: Node):\n        last = None\n        while head:\n"
    "            last, head.next, head = head, last, head.next\n        return last"
)
TURN = (
    "def check(candidate):\n    assert same(candidate(head=nodes([1, 2])), nodes([2, 1]))\n"
    "    assert same(candidate(head = nodes(range(2000))), nodes(range(1999, -1, -1)))"
)
FUTURE = "from __future__ import annotations\ndef half(x: Y): return 2"
BODY = "    return x // 2"
PAIRS = {"test_setup_code": "root = Pair(1)\nroot.other = Pair(2)"}
ITEMS = {"test_setup_code": "items = []\nfor n in (1, 2):\n    items.append(Pair(n))"}
SILENT = {"test_setup_code": "class Pair:\n    def __repr__(self): return self.text"}
PAIR = (
    "class Pair:\n    __eq__ = lambda s, o: True\n    def __init__(self, n): self.n, self.other = n, None\n"
    "    def total(self): return self.n + (self.other.total() if self.other else 0)\n"
)
RAISES = "try:\n    f(0)\nexcept ValueError as error:\n    assert 'zero' in str(error)\nelse:\n    assert False"


@pytest.mark.parametrize(
    ("tests", "columns", "program", "verdicts"),
    [
        # MBPP, AceCode
        (["assert f(1) == (1, {2}, {3: 4})"], {}, "def f(n): return n, {2}, {3: 4}", "passed"),
        (["assert f(1) == (1, 2)"], {}, "def f(n): return [n, 2]", "wrong"),
        (["assert math.isclose(f(2), 1.41421356, rel_tol=LIMIT)", "assert f(4) == 3"], SETUP,
         "def f(n): return n ** 0.5", "passed wrong"),
        (["assert sum(10, 15) == 6"], {}, "def sum(a, b): return 6", "passed"),
        (["assert Solution().f(1) == 2", "assert set(f(2)) == {3}"], {},
         "class Solution:\n    def f(self, n): return 2 if n == 1 else [3]", "passed passed"),
        (["assert f('aab') == {'a': 2, 'b': 1}"], {}, "from collections import Counter as f", "passed"),
        ([RAISES], {}, "def f(n): raise ValueError('zero')", "passed"),
        ([RAISES], {}, "def f(n): raise SystemExit('zero')", "error"),
        (["assert f(1)", "assert f(2)"], {}, "def f(n):\n    while n == 1: pass\n    return 1", "timeout not run"),
        (["assert sys.maxsize > 3 and f([1, 'a'], str) == ['a']"], {},
         "import sys\ndef f(items, kind): return [i for i in items if type(i) is kind]", "passed"),
        (["assert f(root) == 3", "assert f([Pair(1), Pair(2)][1]) == 2"], PAIRS, PAIR + "def f(p): return p.total()",
         "passed passed"),
        (["assert len(items) == 2", "assert f(items) == 3"], ITEMS, PAIR + "def f(i): return sum(p.n for p in i)",
         "passed passed"),
        ("def check(f):\n    for n in (1, 2):\n        m = f(n)\n        assert m > 0\n    assert m == 2",
         {"entry_point": "f"}, "def f(n): return n", "passed passed"),
        (["assert f(root) == 3"], PAIRS, PAIR + "def f(p): return Pair(3)", "wrong"),
        (["assert f(f(9)) == 2**20_001", "assert f(8) == f(9)"], {},
         "def f(n): return n * 2 if n > 9 else (-1) ** n * -2**20_000", "passed wrong"),
        (["assert f(complex('inf')) == complex('-inf')"], {}, "def f(n): return -n", "passed"),
        (["assert f(3).n == 3"], SILENT, "class Pair: pass\ndef f(n):\n    p = Pair()\n    p.n = n\n    return p",
         "passed"),
        (["assert f(1)"], {}, "def f(n): return (i for i in 'ab')", "error"),
        # HumanEval: the function, and the body of the one in the prompt
        (CHECK, {"entry_point": "half", "prompt": PROMPT}, "def half(x): return x // 2", "passed passed passed"),
        (CHECK, {"entry_point": "half", "prompt": PROMPT}, BODY, "passed passed passed"),
        (CHECK, {"entry_point": "half", "prompt": PROMPT}, FUTURE, "passed wrong wrong"),
        (CHECK, {"entry_point": "half", "prompt": PROMPT}, "def half(x): raise KeyError", "error error error"),
        # LeetCodeDataset
        (TURN, {"entry_point": "Solution().turn", "prompt": LISTS}, REVERSED, "passed passed"),
        (TURN, {"entry_point": "Solution().turn", "prompt": LISTS}, REVERSED.replace("return last", "return head"),
         "wrong wrong"),
    ],
)  # fmt: skip
def test_assertions_of_published_sets(code_reward, tests, columns, program: str, verdicts: str) -> None:
    result = score(code_reward(partial=True), tests, program, **columns)
    assert " ".join(result.info["verdicts"]) == verdicts, result.info
    assert result.value == result.info["verdicts"].count("passed") / len(result.info["verdicts"])


def test_a_failed_test_says_what_was_returned(code_reward) -> None:
    result = score(code_reward(), ["assert f(2) == 3", "assert f(1) == f(f(1))"], "def f(n): return [n]")
    assert (result.info["verdicts"], result.info["failed"]) == (["wrong", "not run"], "test 0: f() returned [2]")


def test_the_assertions_of_a_row_are_prepared_once_for_all_answers(code_reward, launcher, monkeypatch) -> None:
    starts = []
    run = launcher.run
    monkeypatch.setattr(launcher, "run", lambda *words, **options: (starts.append(words), run(*words, **options))[1])
    reward = code_reward()
    groups = [group(["assert f(2) == 3"], fenced(f"def f(n): return n + {k}")) for k in range(3)]

    async def together():
        return await asyncio.gather(*map(reward.score, groups))

    assert [result.value for (result,) in asyncio.run(together())] == [0, 1, 0]
    assert len(starts) == 1 + 2 * 3
    with pytest.raises(RewardError, match="no test of the row calls a function of the program"):
        score(reward, ["assert 1 == 1"], "def f(n): return n")
    with pytest.raises(RewardError, match="no test of the row calls a function of the program"):
        score(reward, ["assert 1 == 1"], "def f(n): return n")
    assert len(starts) == 1 + 2 * 3 + 2, "a row that failed is evaluated again"


def test_calls_that_need_results_end_after_some_starts(code_reward, monkeypatch) -> None:
    monkeypatch.setattr(assertions, "ROUNDS", 3)
    tests = ["assert f(f(f(0))) == 3", "assert f(f(f(f(1)))) == 5"]
    result = score(code_reward(partial=True), tests, "def f(n): return n + 1")
    assert (result.info["verdicts"], "in more than 3 steps" in result.info["failed"]) == (["passed", "not run"], True)


@pytest.mark.parametrize(
    ("tests", "columns", "message"),
    [
        (CHECK, {"prompt": "import no_package", "entry_point": "f"}, "do not run: ModuleNot.*`interpreter`"),
        (["assert f(1)"], {"test_setup_code": "import no_package"}, "before it calls a program: ModuleNotFound"),
        (
            "def check(c):\n    assert c(1)",
            {"prompt": "import no_package", "entry_point": "f"},
            "do not run: ModuleNot.*`inter",
        ),
        (["assert 1 == 2", "assert f(1)"], {}, "test 0 of the row fails before it calls a program"),
        ("def check(candidate):\n    assert len('a') == 1", {"entry_point": "f"}, "no test of the row calls"),
        ("def test_f():\n    assert f(1)", {}, "no test of the row calls"),
    ],
)
def test_rows_that_no_program_can_pass_are_refused(code_reward, tests, columns, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        score(code_reward(), tests, "def f(n): return n", **columns)


class Point:
    pass


@pytest.mark.slow
def test_values_return_as_they_were() -> None:
    point = Point()
    point.x, point.other = (1, frozenset({b"a"})), None
    classes = {"__name__": __name__, "Point": Point}
    long = [10**5000, -(10**5000), complex("inf")]
    value = [None, True, 1, -0.0, 1e300, 2j, "\ud800", {(1,): {2}}, math.inf, point, [[]], *long]
    result = unpack(pack(value, classes), classes)
    assert vars(result.pop(9)) == vars(point)
    value.pop(9)
    assert (result, [type(item) for item in result], str(result[3])) == (value, [type(item) for item in value], "-0.0")
    assert math.isnan(unpack(pack(math.nan, {}), {}))
    endless = []
    endless.append(endless)
    for bad in (endless, object(), Point()):
        with pytest.raises(TypeError, match="a value"):
            pack(bad, {})
    for nodes in ([("list", 0, 1)], [("Counter", 1, 0)], [("type", "object", 0)], [("list", 1)], []):
        with pytest.raises((TypeError, ValueError, KeyError, IndexError)):
            unpack(nodes, {"__name__": "tests", "Counter": Counter})
