"""How often the reward `math`, and math-verify alone, judge labelled pairs of answers as the label does:
`python benchmarks/math_answers.py FOLDER`, the folder `tests` of huggingface/Math-Verify.

The pairs are the cases `(gold, pred, expected)` of its tests, and those of the tests of this reward: each list favours
the side that wrote it. Of a text with several formulas the reward gets the last, as from its own extraction.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from math_verify import parse, verify
from rlhf_plugin_math.equivalence import equivalent
from rlhf_plugin_math.extraction import extract_answer

Pair = tuple[str, str, bool]
"""True answer, answer, whether they are equal."""
TEST_FILE = Path(__file__).parent.parent / "plugins/rewards/math/tests/test_math.py"
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
PLACES = ("boxed", "hash", "tag", "answer_is", "last_number")


def literals(nodes: list[ast.expr]) -> Iterator[Any]:
    for node in nodes:
        with suppress(ValueError):
            yield ast.literal_eval(node)


def their_pairs(folder: Path) -> Iterator[Pair]:
    for file in sorted(folder.glob("test_*.py")):
        for call in ast.walk(ast.parse(file.read_text())):
            match call:
                case ast.Call(
                    func=ast.Attribute(attr="parametrize"), args=[ast.Constant(value=str(names)), ast.List(elts)]
                ):
                    if [name.strip() for name in names.split(",")][:3] == ["gold", "pred", "expected"]:
                        yield from ((case[0], case[1], bool(case[2])) for case in literals(elts))


def our_pairs() -> Iterator[Pair]:
    for function in ast.parse(TEST_FILE.read_text()).body:
        match function:
            case ast.FunctionDef(
                name="test_equal" | "test_not_equal" as name, decorator_list=[ast.Call(args=[_, ast.List(elts)])]
            ):
                yield from (
                    (rf"\boxed{{{truth}}}", rf"\boxed{{{text}}}", name == "test_equal")
                    for text, truth in literals(elts)
                )


def answer_of(text: str) -> str:
    formulas = [next(filter(None, groups)) for groups in FORMULA.findall(text)]
    return extract_answer(text, ("boxed",)) or (formulas[-1] if formulas else extract_answer(text, PLACES)) or text


def ours(truth: str, text: str) -> bool:
    return equivalent(answer_of(text), answer_of(truth))


def judge_math_verify(truth: str, text: str) -> bool:
    return bool(verify(parse(truth), parse(text)))


def main(folder: Path) -> None:
    logging.disable()
    judges: dict[str, Callable[[str, str], bool]] = {"reward math": ours, "math-verify": judge_math_verify}
    lists = {"Math-Verify's tests": [*their_pairs(folder)], "tests of `math`": [*our_pairs()]}
    if not lists["Math-Verify's tests"]:
        sys.exit(f"{folder} has no pairs; name the folder `tests` of huggingface/Math-Verify")
    print("| pairs | judge | equal ones accepted | others refused | ms a pair |\n|---|---|---|---|---|")
    for name, pairs in lists.items():
        for judge, judged in judges.items():
            begin = time.perf_counter()
            verdicts = [(judged(truth, text), equal) for truth, text, equal in pairs]
            cost = (time.perf_counter() - begin) / len(pairs) * 1000
            equals, unequal = [v for v, equal in verdicts if equal], [v for v, equal in verdicts if not equal]
            counts = f"{sum(equals)} of {len(equals)} | {unequal.count(False)} of {len(unequal)}"
            print(f"| {name} | {judge} | {counts} | {cost:.0f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
