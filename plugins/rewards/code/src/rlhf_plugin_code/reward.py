"""The reward: runs the program in an answer against the tests of its row."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from rlhf.control_groups import usable_cores
from rlhf.errors import RewardError
from rlhf.interfaces import ComponentConfig, Reward, RewardContext
from rlhf.types import Group, RewardResult

from rlhf_plugin_code.assertions import Assertions
from rlhf_plugin_code.grading import Verdict, call_verdicts, stdin_verdict
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.limits import MIB, ProgramLimits
from rlhf_plugin_code.row_tests import AssertionTests, CallTest, StdinTest, read_tests
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher
from rlhf_plugin_code.sandboxes import Choice, candidates, working

Gradable = list[StdinTest] | list[CallTest] | Assertions
ROWS = 32
"""Number of rows whose assertions are kept, because each answer to a row is scored in a call of its own."""


class CodeConfig(ComponentConfig):
    column: str = "tests"
    """Row column with the tests. None in a row: the reward does not apply to it."""
    partial: bool = False
    """False: 1 if all tests pass, else 0. True: the share of tests that pass."""
    extract: Literal["fence", "text"] = "fence"
    """``fence``: the program is the last fenced block of the answer. ``text``: the whole answer."""
    tags: tuple[str, ...] = ("python", "python3", "py", "")
    """Language tags of fenced blocks that may be the program; the empty tag allows blocks without one."""
    sandbox: Choice = "auto"
    """``auto``: ``bwrap`` if it works, else ``sandlock``. ``limits`` does not isolate: programs read the user's files.
    """
    interpreter: str | None = None
    """Path of an interpreter whose installed packages programs may import. If absent: the interpreter of the run, with
    the standard library only."""
    cpu_seconds: Annotated[int, Field(ge=1)] = 5
    """Processor time of one start of a program, summed over its threads."""
    wall_seconds: Annotated[float, Field(gt=0)] = 15.0
    """Wall-clock time of one start of a program."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Address space."""
    disk_mib: Annotated[int, Field(ge=1)] = 16
    """Size of the temporary folder."""
    output_kib: Annotated[int, Field(ge=1)] = 1024
    """Standard output."""
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    """Largest difference of floats that functions return, absolute and relative; 0: they must be equal."""


class CodeReward(Reward):
    """Functions are called one after another in one start of the program. A test with standard input is one start.
    Assertions are evaluated in another sandbox, with the values that the program's functions returned in one or more
    starts. The remaining tests of a program are not run after a time-out and, without ``partial``, after any failed
    test.

    A program that crashes or takes too long fails its test. If the sandbox does not start, the sample fails.
    """

    name = "code"
    source = "Layout inputs/outputs: Hendrycks et al. 2021, arXiv:2105.09938 (APPS)"
    Config = CodeConfig
    per_sample = True
    reads = "text"
    conformance: ClassVar[dict[str, Any]] = {
        "columns": {"prompt": "Add two numbers.", "tests": [{"function": "add", "args": [2, 2], "expected": 4}]},
        "answers": ("```python\ndef add(a, b):\n    return a + b\n```", "", "```\n1/0\n```", "\N{SNOWMAN} " * 50),
        "cases": (({}, "```\ndef add(a, b): return a + b\n```", 1.0), ({}, "```\ndef add(a, b): return 5\n```", 0.0)),
    }

    def __init__(self, config: CodeConfig | None = None) -> None:
        super().__init__(config)
        c = self.config
        self.concurrency = usable_cores()
        self._sandboxes = candidates(c.sandbox)
        self._python = interpreter(c.interpreter)
        self._limits = ProgramLimits(
            c.cpu_seconds, c.wall_seconds, c.memory_mib * MIB, c.disk_mib * MIB, c.output_kib * 1024
        )  # fmt: skip
        self._launcher: SandboxLauncher | None = None
        self._rows: dict[AssertionTests, asyncio.Task[Assertions]] = {}

    def columns(self) -> tuple[str, ...]:
        return (self.config.column,)

    async def setup(self, context: RewardContext) -> None:
        self._launcher, self._rows = await working(self._sandboxes, self._python, self._limits), {}

    async def score(self, group: Group) -> list[RewardResult]:
        tests = read_tests(group.row, self.config.column)
        if tests is None:
            return [RewardResult(None) for _ in group.trajectories]
        if self._launcher is None:
            raise RewardError("reward 'code': score() was called before setup(), which looks for a sandbox")
        launcher = self._launcher
        gradable = await self._assertions(tests, launcher) if isinstance(tests, AssertionTests) else tests
        return [await self._grade(t.answer, gradable, launcher) for t in group.trajectories]

    async def _assertions(self, tests: AssertionTests, launcher: SandboxLauncher) -> Assertions:
        task = self._rows.get(tests)
        if task is None:
            task = self._rows[tests] = asyncio.create_task(Assertions.of_row(tests, launcher))
            if len(self._rows) > ROWS:
                del self._rows[next(iter(self._rows))]
        try:
            return await asyncio.shield(task)  # the deadline of one answer ends no evaluation that others wait for
        except BaseException:
            if task.done():  # it has failed, so that the next attempt evaluates them again
                self._rows.pop(tests, None)
            raise

    async def _grade(self, answer: str, tests: Gradable, launcher: SandboxLauncher) -> RewardResult:
        program = answer if self.config.extract == "text" else last_block(answer, self.config.tags)
        if program is None or not program.strip():
            return RewardResult(0.0, info={"program": False, "passed": 0, "tests": len(tests)})
        verdicts = await self._verdicts(program, tests, launcher)
        counts = Counter(verdict.word for verdict in verdicts)
        passed = counts["passed"]
        value = passed / len(tests) if self.config.partial else float(passed == len(tests))
        failed = next((f"test {n}: {v.reason}" for n, v in enumerate(verdicts) if v.word != "passed"), "")
        words = [verdict.word for verdict in verdicts]
        return RewardResult(
            value,
            info={
                "program": True, "passed": passed, "tests": len(tests), "timeouts": counts["timeout"],
                "verdicts": words, "failed": failed,
            },
        )  # fmt: skip

    async def _verdicts(self, program: str, tests: Gradable, launcher: SandboxLauncher) -> list[Verdict]:
        c = self.config
        if isinstance(tests, Assertions):
            return await tests.verdicts(program, c.cpu_seconds, c.partial)
        calls = [test for test in tests if isinstance(test, CallTest)]
        if calls:
            run = await launcher.run(program, calls=[(test.function, test.arguments) for test in calls])
            return call_verdicts(calls, run, c.cpu_seconds, c.tolerance)
        verdicts: list[Verdict] = []
        for test in tests:
            assert isinstance(test, StdinTest)
            last = verdicts[-1].word if verdicts else "passed"
            if last in ("timeout", "not run") or (last != "passed" and not c.partial):
                verdicts.append(Verdict("not run"))
                continue
            run = await launcher.run(program, test.stdin)
            verdicts.append(stdin_verdict(test, run, c.cpu_seconds))
        return verdicts


MARK = "```"
BLANKS = " \t\r\ufeff"


def last_block(text: str, tags: Sequence[str]) -> str | None:
    """The content of the last closed fenced block with one of these tags; None if there is none. If the fence is
    indented, as in a list, its indentation is removed from each line (CommonMark). The time is linear in the length of
    the text, because this runs on the event loop, where no deadline ends it.

    Args:
        tags: case is ignored; an empty text allows blocks without a tag.
    """
    allowed = {tag.casefold() for tag in tags}
    block, tag, start, indent = None, None, 0, 0
    position = 0
    for line in text.split("\n"):
        position += len(line) + 1
        bare = line.strip(BLANKS)
        if tag is None:
            if bare.startswith(MARK) and "`" not in bare[len(MARK) :]:
                words = bare[len(MARK) :].split(maxsplit=1)
                tag, start, indent = words[0] if words else "", position, len(line) - len(line.lstrip(" "))
        elif bare == MARK:
            if tag.casefold() in allowed:
                block = text[start : position - len(line) - 1], indent
            tag = None
    if block is None:
        return None
    content, indent = block
    return re.sub(rf"^ {{0,{indent}}}", "", content, flags=re.MULTILINE)
