"""The layouts of tests in a row, and messages about others."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import RewardError
from rlhf.types import Row
from rlhf_plugin_code.row_tests import AssertionTests, CallTest, StdinTest, read_tests


def read(value):
    return read_tests(Row({"tests": value}, "unit", 0), "tests")


@pytest.mark.parametrize(
    ("value", "tests"),
    [
        ([{"input": "1\n", "output": "2\n"}], [StdinTest("1\n", "2\n")]),
        ([{"function": "f", "args": [1, "a"], "expected": None}], [CallTest("f", [1, "a"], (None,))]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [StdinTest("1", "3"), StdinTest("2", "4")]),
        ({"inputs": [["1", "2"]], "outputs": [["3", "4"]]}, [StdinTest("1\n2", "3\n4")]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [2]}, [CallTest("f", [1], (2,))]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}, [CallTest("f", [1], ([2], 2))]),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [[2, 3]]}, [CallTest("f", [1], ([2, 3],))]),
        ({"input": ["1\n"], "output": ["2\n"]}, [StdinTest("1\n", "2\n")]),  # CodeContests
        # LiveCodeBench and DeepCoder, then the sets of PrimeIntellect and Open-R1
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [StdinTest("1", "2")]),
        ([{"input": "[1]\n2", "output": "[3]", "testtype": "functional", "metadata": {"func_name": "f"}}],
         [CallTest("f", [[1], 2], ([3],))]),
        ([{"input": "1", "output": "2", "type": "stdin_stdout", "fn_name": None, "language": "python"}],
         [StdinTest("1", "2")]),
        ([{"input": [1], "output": [2], "type": "function_call", "fn_name": "f"}], [CallTest("f", [1], ([2], 2))]),
    ],
)  # fmt: skip
def test_layouts(value, tests) -> None:
    assert read(value) == tests
    assert read(json.dumps(value)) == tests


@pytest.mark.parametrize("metadata", [{"func_name": "f"}, '{"func_name": "f"}'])
def test_the_row_names_the_function_of_its_calls(metadata) -> None:
    """LiveCodeBench's rows, whose metadata is text, and DeepCoder's; metadata of rows of scripts have no name."""
    case = {"input": "[1]\n2", "output": "[3]", "testtype": "functional"}
    for tests in ([case], json.dumps([case]), [{**case, "metadata": {"func_name": None}}]):
        row = Row({"tests": tests, "metadata": metadata}, "unit", 0)
        assert read_tests(row, "tests") == [CallTest("f", [[1], 2], ([3],))]
    script = [{"input": "1", "output": "2", "testtype": "stdin"}]
    for other in (metadata, "{}", None):
        assert read_tests(Row({"tests": script, "metadata": other}, "unit", 0), "tests") == [StdinTest("1", "2")]


CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


@pytest.mark.parametrize(
    ("column", "columns", "tests"),
    [
        ("tests", {"tests": ["assert f(1)"]}, AssertionTests(("assert f(1)",), code=False)),
        ("tests", {"tests": '["assert f(1)"]'}, AssertionTests(("assert f(1)",), code=False)),
        ("test_list", {"test_list": ["assert f(1)"], "test_setup_code": "x = 1", "test_imports": ["import math"]},
         AssertionTests(("assert f(1)",), code=False, setup="import math\nx = 1")),
        ("test", {"test": CHECK, "entry_point": "f", "prompt": "def f(n):\n    'doc'\n"},
         AssertionTests((CHECK,), code=True, prelude="def f(n):\n    'doc'\n", entry_point="f")),
        ("test", {"test": CHECK, "entry_point": "Solution().f", "prompt": "Write f."},
         AssertionTests((CHECK,), code=True, entry_point="f")),
    ],
)  # fmt: skip
def test_assertions(column: str, columns, tests) -> None:
    assert read_tests(Row(columns, "unit", 0), column) == tests


def test_an_entry_point_that_is_no_name_is_refused() -> None:
    with pytest.raises(RewardError, match=r"column 'entry_point' is str 'a\.b'"):
        read_tests(Row({"test": CHECK, "entry_point": "a.b"}, "unit", 0), "test")


def test_a_row_without_tests() -> None:
    assert read(None) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "holds no test"),
        ({"inputs": [], "outputs": []}, "holds no test"),
        ("add(1, 2) == 3", "neither JSON .* nor assertions in Python"),
        ("assert add(1, 2) = 3", "neither JSON .* nor assertions in Python"),
        ("def check(candidate):\n    assert candidate(1)", "no column 'entry_point'"),
        (5, "holds int 5"),
        (["assert f(1)", "add(1, 2) == 3"], "test 1 is str 'add.*not an assertion"),
        ([{"input": "1"}], "test 0 is dict"),
        ([{"input": "1", "output": "2", "weight": 3}], "test 0 is dict"),
        ([{"input": "1", "output": 2}], "test 0, output is int 2. Give text"),
        ([{"input": "1", "output": "2"}, {"function": "f", "args": [], "expected": 1}], "mixes tests"),
        ([{"function": "a b", "args": [], "expected": 1}], "the function is str 'a b'"),
        ([{"function": "f", "args": {"x": 1}, "expected": 1}], "the arguments are dict"),
        ([{"function": "f", "args": [], "expected": {1, 2}}], "expected is set"),
        ([{"function": "f", "args": [], "expected": float("nan")}], "not a JSON value"),
        ({"inputs": ["1"], "outputs": []}, "1 values as inputs and 0 values as outputs"),
        ({"inputs": "1", "outputs": ["2"]}, "str '1' as inputs"),
        ({"inputs": [1], "outputs": ["2"]}, "inputs\\[0\\] is int 1"),
        ({"inputs": ["1"]}, "an object with the keys"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "test 0 is .*: a call needs its function's name"),
        (
            [{"input": "1", "output": "2", "testtype": "functional", "metadata": "{}"}],
            "a call needs its function's name",
        ),
        ([{"input": "1", "output": "2", "type": "stdin", "fn_name": "f"}], "a call needs its function's name"),
        ([{"input": "1", "output": "x", "testtype": "functional", "metadata": {"func_name": "f"}}], "lines of JSON"),
    ],
)
def test_other_layouts_are_refused(value, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        read(value)


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RewardError, match=r"no column 'tests'; it has \['prompt'\]. Set `column`"):
        read_tests(Row({"prompt": "x"}, "unit", 0), "tests")
