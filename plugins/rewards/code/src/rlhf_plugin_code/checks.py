"""The check ``code`` of ``rlhf doctor``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from rlhf.interfaces import Check, Examination, Finding


class CodeCheck(Check):
    """Finds the sandboxes that can run the programs of the reward ``code`` on this machine."""

    name = "code"

    def examine(self, examination: Examination) -> Iterator[Finding]:
        answer = examination.ask(find_sandbox)
        if answer.error:
            remedy = "needed by the reward `code` only; its how-to page says what each sandbox needs"
            yield Finding("code", "warn", answer.error, remedy)
        else:
            yield Finding("code", "ok", f"programs run in the sandbox {answer.value}")


def find_sandbox(argument: Any, report: Callable[[Any], None]) -> None:
    """The name of the sandbox that ``sandbox = "auto"`` uses."""
    from rlhf_plugin_code.interpreter import interpreter
    from rlhf_plugin_code.limits import MIB, ProgramLimits
    from rlhf_plugin_code.sandboxes import candidates, working

    limits = ProgramLimits(cpu_seconds=5, wall_seconds=30.0, memory=512 * MIB, disk=MIB, output=MIB)
    launcher = asyncio.run(working(candidates("auto"), interpreter(None), limits))
    report(launcher.sandbox)
    launcher.close()
