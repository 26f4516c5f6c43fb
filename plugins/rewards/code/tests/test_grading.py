"""Where the program is found, and how answers are compared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from groups import score
from rlhf_plugin_code.grading import call_verdicts, matches, stdin_verdict
from rlhf_plugin_code.reward import last_block
from rlhf_plugin_code.row_tests import CallTest, StdinTest
from rlhf_plugin_code.sandbox_launcher import Finished

TAGS = ("python", "")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nthen\n```Python\nb\n\nc\n```\nend", "b\n\nc\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```python\na\n```\n```python\nnever closed", "a\n"),
        ("  ```python title=x\n  a\n  ```", "a\n"),
        ("1. So:\n   ```python\n   def f():\n       a\n b\n   ```", "def f():\n    a\nb\n"),
        ("```python\n    return 1\n```", "    return 1\n"),
        ("``` python\n```", ""),
        ("a = 1", None),
        ("```python a = 1```", None),
        ("```json\n{}\n```", None),
        ("```python\na\n```python\nb\n```\nc", "a\n```python\nb\n"),
        ("```python\n```python\n", None),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
    ],
)
def test_the_last_block(text: str, program: str | None) -> None:
    assert last_block(text, TAGS) == program


REPEATED = r"""
from rlhf_plugin_code.reward import last_block
for begin in ("", "```"):
    for part in ("```python\n", "```python\na\n", "```\n", "`", " ", "\n", "a"):
        for end in ("", "`"):
            last_block(begin + part * (1_000_000 // len(part)) + end, ("python", ""))
"""


@pytest.mark.slow
def test_a_text_that_repeats_itself_is_searched_in_linear_time() -> None:
    """A million characters take a moment; in quadratic time they would take an hour."""
    subprocess.run([sys.executable, "-c", REPEATED], check=True, timeout=60)


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, 1, True), (1, 1.0, False), (True, 1, False), (1, True, False), (None, False, False), ("1", 1, False),
        ([1, [2]], [1, [2]], True), ([1], [1, 2], False), ([1, True], [1, 1], False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True), ({"a": 1}, {"a": True}, False), ({}, [], False),
        (0.1 + 0.2, 0.3, False),
    ],
)  # fmt: skip
def test_types_and_values_are_equal(value, expected, equal: bool) -> None:
    assert matches(value, expected, 0.0) is equal


def test_floats_within_a_tolerance() -> None:
    assert matches([0.1 + 0.2], [0.3], 1e-9)
    assert not matches(0.31, 0.3, 1e-9)
    assert not matches(1, 1.0, 1e-9)


@pytest.mark.parametrize(
    ("out", "passes"),
    [("5\n6\n", True), ("5\n6", True), ("5  \r\n6\n\n\n", True), ("5 6\n", False), (" 5\n6", False), ("", False)],
)
def test_printed_lines(out: str, passes: bool) -> None:
    run = Finished("exit", 0, 0.1, out, "", "n")
    assert (stdin_verdict(StdinTest("", "5\n6\n"), run, 1).word == "passed") is passes


@pytest.mark.parametrize(
    ("run", "word", "reason"),
    [
        (Finished("exit", 1, 0.1, "5", "Traceback\nValueError: late", "n"), "error", "ValueError: late"),
        (Finished("exit", 3, 0.1, "5", "", "n"), "error", "it ended with status 3"),
        (Finished("wall", -9, 3.0, "5", "", "n"), "timeout", "it was killed at the limit of wall time"),
        (Finished("exit", 137, 1.1, "5", "", "n"), "timeout", "it was killed at the limit of processor time"),
        (Finished("exit", 137, 0.1, "5", "", "n"), "error", "it ended with status 137"),
        (Finished("output", -9, 0.1, "5", "", "n"), "output", "it wrote more than the limit"),
    ],
)
def test_a_program_that_fails(run: Finished, word: str, reason: str) -> None:
    verdict = stdin_verdict(StdinTest("", "5"), run, 1)
    assert (verdict.word, verdict.reason) == (word, reason)


def test_lines_without_the_nonce_and_second_answers_are_no_answers() -> None:
    tests = [CallTest("f", [], (n,)) for n in range(4)]
    out = "x 0 = 0\nn 1 = 1\nn 2 = 2\nn 2 = 2\nn 3 = \nn 9 = 9\nn ² = 1"
    verdicts = call_verdicts(tests, Finished("exit", 0, 0.1, out, "", "n"), 1, 0.0)
    assert [verdict.word for verdict in verdicts] == ["error", "passed", "error", "error"]


def test_calls_after_a_time_out_were_not_run() -> None:
    tests = [CallTest("f", [], (n,)) for n in range(3)]
    verdicts = call_verdicts(tests, Finished("wall", -9, 9.0, "n 0 = 0\n", "", "n"), 1, 0.0)
    assert [verdict.word for verdict in verdicts] == ["passed", "timeout", "not run"]


RETURNS = {
    "(1, 2)": "passed", "[1, 2]": "passed", "[1, 2.0]": "wrong", "[True, 2]": "wrong", "{1, 2}": "error",
    "float('nan')": "error", "{1: 2}": "error", "10**5000": "error", "'\\ud800'": "wrong", "[[]] * 3": "wrong",
    "deep": "error", "b'12'": "error", "1/0": "error", "exit()": "error",
}  # fmt: skip


def test_what_functions_may_return(code_reward) -> None:
    names = [f"f{n}" for n in range(len(RETURNS))]
    program = "deep = []\ndeep.append(deep)\n" + "\n".join(
        f"def {name}(): return {value}" for name, value in zip(names, RETURNS, strict=True)
    )
    tests = [{"function": name, "args": [], "expected": [1, 2]} for name in names]
    assert score(code_reward(), tests, program).info["verdicts"] == list(RETURNS.values())


def test_what_a_program_says_is_always_text_that_can_be_written(code_reward) -> None:
    program = "def f():\n    raise ValueError('\\ud800')"
    result = score(code_reward(), [{"function": "f", "args": [], "expected": 1}], program)
    assert result.info["failed"] == "test 0: ValueError: ?"


def test_methods_of_a_class_solution_are_found(code_reward) -> None:
    program = "class Solution:\n    def f(self, a): return a[::-1]\nif __name__ == '__main__': raise ValueError"
    assert score(code_reward(), {"fn_name": "f", "inputs": [["ab"]], "outputs": [["ba"]]}, program).value == 1.0
    result = score(code_reward(), {"fn_name": "g", "inputs": [["ab"]], "outputs": [["ba"]]}, program)
    assert (result.value, result.info["verdicts"]) == (0.0, ["error"])


def test_a_script_is_the_main_module(code_reward) -> None:
    program = (
        "from dataclasses import dataclass\nimport pickle, sys\n@dataclass\nclass A:\n    x: 'int'\n"
        "if __name__ == '__main__':\n    print(pickle.loads(pickle.dumps(A(1))), sys.argv, len(input()))\n    quit()"
    )
    output = "A(x=1) ['program.py'] 100000"
    result = score(code_reward(), [{"input": "x" * 100000 + "\n", "output": output}], program)
    assert result.value == 1.0, result.info


def test_tests_after_a_time_out_are_not_run(code_reward) -> None:
    tests = [{"input": str(n), "output": str(n)} for n in range(4)]
    program = "n = input()\nwhile n == '1': pass\nprint(n)"
    result = score(code_reward(partial=True), tests, program)
    assert (result.value, result.info["timeouts"]) == (0.25, 1)
    assert result.info["verdicts"] == ["passed", "timeout", "not run", "not run"]


def test_without_partial_nothing_is_run_after_a_failed_test(code_reward) -> None:
    tests = [{"input": str(n), "output": "0"} for n in range(3)]
    assert score(code_reward(), tests, "print(input())").info["verdicts"] == ["passed", "wrong", "not run"]
    assert score(code_reward(partial=True), tests, "print(input())").info["verdicts"] == ["passed", "wrong", "wrong"]


def test_an_answer_without_a_program(code_reward) -> None:
    result = score(code_reward(tags=("c",)), [{"input": "", "output": ""}], "print()")
    assert (result.value, result.info) == (0.0, {"program": False, "passed": 0, "tests": 1})


RIGHT = {
    "a thread pool": (
        "from multiprocessing.dummy import Pool\nwith Pool(8) as pool: print(sum(pool.map(int, ['2', '3'])))"
    ),
    "an executor": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(int, ['2', '3'])))"
    ),
    "locks": (
        "from multiprocessing import Lock, RLock, Semaphore\nlock = Lock()\nwith lock, RLock(), Semaphore(2):\n"
        "    print(5 if not lock.acquire(timeout=0.01) else 0)"
    ),
    "an event loop": "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))",
    "its file": "import os\nprint(5 if os.path.basename(__file__).endswith('.py') else 0)",
    "its source": "import inspect\ndef f():\n    return 5\nassert 'return 5' in inspect.getsource(f)\nprint(f())",
    "a byte-order mark": "\ufeffprint(5)",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_are_not_refused(run, name: str) -> None:
    result = run(RIGHT[name])
    assert (result.out, result.err) == ("5\n", "")


def test_a_byte_order_mark_before_the_fence() -> None:
    assert last_block("\ufeff```python\na\n```", TAGS) == "a\n"
