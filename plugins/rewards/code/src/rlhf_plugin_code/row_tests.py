"""The tests of a row, in one of the accepted layouts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import RewardError, brief
from rlhf.types import Row

LAYOUTS = (
    'Accepted: a list of {"input": text, "output": text}; a list of {"function": name, "args": [...], "expected": '
    'value}; or {"inputs": [...], "outputs": [...]}, with "fn_name" for calls of a function; a list of texts with '
    "assertions; one of these as JSON text; or the Python code of tests."
)

_OF_KINDS = {"input", "output", "type", "testtype", "fn_name", "metadata", "language"}


@dataclass(frozen=True, slots=True)
class StdinTest:
    """The program is run with ``stdin`` as standard input and must print ``expected``."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """``function(*arguments)`` must return one of ``expected``."""

    function: str
    arguments: list[Any]
    expected: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class AssertionTests:
    """Python code that calls functions of the program."""

    texts: tuple[str, ...]
    """The tests, one per text. A single text that is ``code`` holds all tests."""
    code: bool
    prelude: str = ""
    """Code before the program and before the tests: imports and classes that both use."""
    setup: str = ""
    """Code before the tests."""
    entry_point: str = ""
    """The function under test, which ``check`` gets; empty: tests call it by its name."""


Tests = list[StdinTest] | list[CallTest] | AssertionTests
ENTRY_POINT = re.compile(r"(?:Solution\(\)\.)?([A-Za-z_]\w*)")


def read_tests(row: Row, column: str) -> Tests | None:
    """The tests of a row, all of one kind and at least one. None if the column holds None. For assertions, other
    columns of the row are read too, as in published data sets.

    Raises RewardError for any other layout.
    """
    if column not in row.columns:
        raise RewardError(
            f"reward 'code': the row has no column {column!r}; it has {sorted(row.columns)}. Set `column`."
        )
    value = row[column]
    if value is None:
        return None
    label = f"reward 'code': column {column!r}"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            if _python(value, ast.Assert):
                return _code(row, value, label)
            problem = f"neither JSON ({error}) nor assertions in Python"
            raise RewardError(f"{label} holds text that is {problem}. {LAYOUTS}") from None
    if _is_list(value) and value and all(isinstance(text, str) for text in value):
        return _assertions(row, value, label)
    name = row.get("metadata.func_name")
    tests = _columns(value, label) if isinstance(value, Mapping) else _list(value, label, name)
    if not tests:
        raise RewardError(f"{label} holds no test. Give at least one, or None where the reward does not apply.")
    return tests


def _assertions(row: Row, texts: Sequence[str], label: str) -> AssertionTests:
    """The layout of MBPP and AceCode."""
    for n, text in enumerate(texts):
        if not _python(text, ast.Assert):
            raise RewardError(f"{label}, test {n} is {brief(text)}, which is not an assertion in Python. {LAYOUTS}")
    parts = [*(row.columns.get("test_imports") or ()), row.columns.get("test_setup_code") or ""]
    setup = "\n".join(_text(text, "reward 'code': columns test_imports and test_setup_code") for text in parts)
    return AssertionTests(tuple(texts), code=False, setup=setup)


def _code(row: Row, text: str, label: str) -> AssertionTests:
    """The layout of HumanEval and LeetCodeDataset. Their column ``prompt`` begins a program; a question in it is left
    out."""
    entry, prompt = row.columns.get("entry_point") or "", row.columns.get("prompt")
    match = ENTRY_POINT.fullmatch(entry) if isinstance(entry, str) else None
    if entry and match is None:
        raise RewardError(f"reward 'code': column 'entry_point' is {brief(entry)}. Give the name of a function.")
    if match is None and any(isinstance(s, ast.FunctionDef) and s.name == "check" for s in ast.parse(text).body):
        raise RewardError(f"{label} defines check(), and the row has no column 'entry_point' with the function's name.")
    statements = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    prelude = prompt if isinstance(prompt, str) and _python(prompt, *statements) else ""
    return AssertionTests((text,), code=True, prelude=prelude, entry_point=match[1] if match else "")


def _python(text: str, *kinds: type[ast.AST]) -> bool:
    """Whether the text is Python with a statement of one of these kinds."""
    try:
        return any(isinstance(node, kinds) for node in ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _list(value: Any, label: str, name: Any) -> list[StdinTest] | list[CallTest]:
    """
    Args:
        name: the function's name in the row's column ``metadata``, for calls that do not have it.
    """
    if not _is_list(value):
        raise RewardError(f"{label} holds {brief(value)}. {LAYOUTS}")
    stdin: list[StdinTest] = []
    calls: list[CallTest] = []
    for n, case in enumerate(value):
        test_label = f"{label}, test {n}"
        keys = set(case) if isinstance(case, Mapping) else None
        if keys == {"input", "output"}:
            stdin.append(
                StdinTest(_text(case["input"], f"{test_label}, input"), _text(case["output"], f"{test_label}, output"))
            )
        elif keys == {"function", "args", "expected"}:
            calls.append(_call(case["function"], case["args"], case["expected"], test_label))
        elif keys and {"input", "output"} < keys <= _OF_KINDS:
            test = _of_kind(case, test_label, name)
            stdin, calls = (stdin, [*calls, test]) if isinstance(test, CallTest) else ([*stdin, test], calls)
        else:
            raise RewardError(f"{test_label} is {brief(case)}. {LAYOUTS}")
    if stdin and calls:
        raise RewardError(f"{label} mixes tests by standard input and calls of functions. Use one kind per row.")
    return stdin or calls


def _of_kind(case: Mapping[str, Any], label: str, row_name: Any) -> StdinTest | CallTest:
    """A test that says whether it is a call: in ``type`` (PrimeIntellect's data sets) or ``testtype`` (LiveCodeBench,
    where arguments and result are lines of JSON)."""
    metadata = case.get("metadata")
    name = case.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    calls = case.get("testtype", case.get("type")) not in (None, "stdin", "stdin_stdout")
    name = name or (row_name if calls else None)
    if calls != bool(name):
        raise RewardError(
            f"{label} is {brief(case)}: a call needs its function's name (fn_name or metadata.func_name, or "
            "metadata.func_name of the row)."
        )
    if not calls:
        return StdinTest(_lines(case["input"], f"{label}, input"), _lines(case["output"], f"{label}, output"))
    if "testtype" not in case:
        return _columns({"inputs": [case["input"]], "outputs": [case["output"]], "fn_name": name}, label)[0]
    try:
        lines = [json.loads(line) for line in (*case["input"].split("\n"), case["output"])]
    except (AttributeError, TypeError, ValueError, RecursionError):
        raise RewardError(f"{label} is {brief(case)}: arguments and result must be lines of JSON.") from None
    return _call(name, lines[:-1], lines[-1], label)


def _columns(value: Mapping[str, Any], label: str) -> list[StdinTest] | list[CallTest]:
    """The layout of APPS and TACO. An input or output of a script may be a list of lines. The expected value of a call
    may be in a list with one item, which is common in these data sets."""
    if set(value) == {"input", "output"}:  # of CodeContests
        value = {"inputs": value["input"], "outputs": value["output"]}
    if not {"inputs", "outputs"} <= set(value) <= {"inputs", "outputs", "fn_name"}:
        raise RewardError(f"{label} holds an object with the keys {sorted(value)}. {LAYOUTS}")
    inputs, outputs, name = value["inputs"], value["outputs"], value.get("fn_name")
    if not _is_list(inputs) or not _is_list(outputs) or len(inputs) != len(outputs):
        sizes = [f"{len(v)} values" if _is_list(v) else brief(v) for v in (inputs, outputs)]
        raise RewardError(
            f"{label} holds {sizes[0]} as inputs and {sizes[1]} as outputs. Give two lists of the same length."
        )
    pairs = list(enumerate(zip(inputs, outputs, strict=True)))
    if name is None:
        return [
            StdinTest(_lines(stdin, f"{label}, inputs[{n}]"), _lines(expected, f"{label}, outputs[{n}]"))
            for n, (stdin, expected) in pairs
        ]
    tests = []
    for n, (arguments, expected) in pairs:
        test = _call(name, arguments, expected, f"{label}, test {n}")
        inner = (*test.expected, *test.expected[0]) if _is_list(expected) and len(expected) == 1 else test.expected
        tests.append(CallTest(test.function, test.arguments, inner))
    return tests


def _call(function: Any, arguments: Any, expected: Any, label: str) -> CallTest:
    if not isinstance(function, str) or not function.isidentifier():
        raise RewardError(f"{label}: the function is {brief(function)}. Give the function's name.")
    if not _is_list(arguments):
        raise RewardError(f"{label}: the arguments are {brief(arguments)}. Give a list.")
    return CallTest(function, _json(arguments, f"{label}, args"), (_json(expected, f"{label}, expected"),))


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _text(value: Any, label: str) -> str:
    if not isinstance(value, str):
        raise RewardError(f"{label} is {brief(value)}. Give text.")
    return value


def _lines(value: Any, label: str) -> str:
    return "\n".join(_text(line, label) for line in value) if _is_list(value) else _text(value, label)


def _json(value: Any, label: str) -> Any:
    """The value after a round trip through JSON, so that types can be compared exactly."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardError(f"{label} is {brief(value)}, which is not a JSON value: {error}") from None
