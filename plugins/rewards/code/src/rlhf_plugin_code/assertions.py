"""Assertions, which are evaluated in one sandbox with the values that the program returned in another sandbox.

So the program has no access to assertions, expected values or the evaluator, and its values arrive without its methods.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from importlib.resources import files

from rlhf.errors import RewardError

from rlhf_plugin_code.grading import Verdict, call_answers, printable
from rlhf_plugin_code.row_tests import AssertionTests
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher

VALUES = files("rlhf_plugin_code").joinpath("values.py").read_text()
EVALUATE = VALUES + files("rlhf_plugin_code").joinpath("inside_assertions.py").read_text()
ROUNDS = 20
"""Largest number of starts of a program, for calls whose arguments depend on results of earlier calls."""
Call = tuple[str, str]
"""(name of a function, nodes of its arguments as text)."""


@dataclass(frozen=True, slots=True)
class TestResults:
    """Verdicts of the tests, and the calls that the program has not answered yet."""

    verdicts: list[Verdict]
    calls: list[Call]


class Assertions:
    """The assertions of a row, with their first calls."""

    def __init__(self, tests: AssertionTests, launcher: SandboxLauncher) -> None:
        self._tests, self._launcher = tests, launcher
        self._first = TestResults([], [])

    def __len__(self) -> int:
        return len(self._first.verdicts)

    @classmethod
    async def of_row(cls, tests: AssertionTests, launcher: SandboxLauncher) -> Assertions:
        """Raises RewardError for assertions that fail without a program, or call none of its functions."""
        assertions = cls(tests, launcher)
        evaluation = await assertions._evaluate({})
        if isinstance(evaluation, str):
            raise RewardError(
                f"reward 'code': the tests of the row do not run: {evaluation}. Packages that they import must be "
                "installed for `interpreter`."
            )
        for n, verdict in enumerate(evaluation.verdicts):
            if verdict.word not in ("passed", "unanswered"):
                raise RewardError(
                    f"reward 'code': test {n} of the row fails before it calls a program: {verdict.reason}"
                )
        if not evaluation.calls:
            raise RewardError("reward 'code': no test of the row calls a function of the program")
        assertions._first = evaluation
        return assertions

    async def verdicts(self, program: str, cpu_seconds: int, partial: bool) -> list[Verdict]:
        """One verdict per test.

        Args:
            cpu_seconds: processor time of each start of the program.
            partial: whether tests continue after a failed one.
        """
        prelude = self._tests.prelude
        if program.lstrip("\n")[:1] in (" ", "\t"):  # the body of the function that the prelude begins
            prelude, program = "", prelude + program
        answers: dict[Call, tuple[str, str]] = {}
        evaluation = self._first
        for _ in range(ROUNDS):
            calls = [(name, ast.literal_eval(arguments)) for name, arguments in evaluation.calls]
            run = await self._launcher.run(program, calls=calls, prelude=prelude, values=VALUES)
            replies = call_answers(len(calls), run, cpu_seconds)
            answers.update(zip(evaluation.calls, map(_answer, replies), strict=True))
            following = await self._evaluate(answers)
            if isinstance(following, str):
                return [Verdict("error", f"its answers end the tests: {following}")] * len(self)
            evaluation = following
            failed = any(verdict.word not in ("passed", "unanswered") for verdict in evaluation.verdicts)
            if not evaluation.calls or (failed and not partial):
                waiting = Verdict("not run", "another test had failed")
                break
        else:
            waiting = Verdict("not run", f"its calls depend on the results of other calls in more than {ROUNDS} steps")
        return [waiting if verdict.word == "unanswered" else verdict for verdict in evaluation.verdicts]

    async def _evaluate(self, answers: dict[Call, tuple[str, str]]) -> TestResults | str:
        """The verdicts, or the reason why there are none."""
        tests = self._tests
        setup = {
            "prelude": tests.prelude,
            "before": tests.setup,
            "tests": list(tests.texts),
            "apart": not tests.code,
            "entry_point": tests.entry_point,
            "answers": answers,
        }
        run = await self._launcher.run(EVALUATE, ascii(setup))
        if run.end != "exit" or run.code or not run.out:
            return run.err.rsplit("\n", 1)[-1] if run.end == "exit" and run.err else f"{run.end}, status {run.code}"
        result = json.loads(run.out)
        return TestResults(
            [Verdict(word, printable(detail)) for word, detail in result["verdicts"]],
            [(name, arguments) for name, arguments in result["calls"]],
        )


def _answer(reply: str | Verdict) -> tuple[str, str]:
    """A reply in the form that the evaluation reads: a value's nodes, an exception, or the verdict of a call without
    either."""
    if isinstance(reply, Verdict):
        return reply.word, reply.reason
    kind, _, text = reply.partition(" ")
    if kind == "=":
        return "returned", text
    try:
        return "raised", str(json.loads(text))
    except (ValueError, RecursionError):
        return "error", f"an answer that is not text: {text[:60]!r}"
