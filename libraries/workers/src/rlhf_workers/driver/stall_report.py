"""The report about a stalled worker: its call and its duration, its stacks, and hints what to check."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_workers.driver.calls import CallFailed, Calls
from rlhf_workers.driver.handle import WorkerHandle, slug
from rlhf_workers.driver.node_tools import inspect_process, log_tail

_ASK_SECONDS = 5.0
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_to_all", "rendezvous")
"""Parts of function names that indicate waiting for other ranks."""
_LOG_LINES = 20
_MAX_OTHERS = 16
"""Maximum number of other workers whose stacks are in the report."""


@dataclass
class StallReport:
    """A worker that does not respond (``silent``), or responds but makes no progress."""

    calls: Calls
    member: WorkerHandle
    doing: str
    seconds: float
    silent: bool
    waited_for: Sequence[WorkerHandle]
    """All pending workers, including the stalled one."""

    @property
    def headline(self) -> str:
        symptom = "has not responded" if self.silent else "has made no progress"
        return f"{self.member.name} ({self.member.location}) {symptom} for {self.seconds:.0f} s in {self.doing}"

    def write(self, folder: Path) -> str:
        """Write the report to ``stall-<role>-<rank>.txt`` in ``folder``, which is created if needed. Returns the path,
        or the report itself if it cannot be written."""
        path, page = folder / f"stall-{slug(self.member.name)}.txt", self.page()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as cause:  # the worker may be waiting for the same disk
            return f"{path} cannot be written ({cause}). Its content is:\n{page}"
        return str(path.absolute())

    def page(self) -> str:
        """The report's text."""
        pending_members = [m for m in self.waited_for if m is not self.member]
        members, remainder = [self.member, *pending_members[:_MAX_OTHERS]], pending_members[_MAX_OTHERS:]
        stacks = [m.side_call("stacks") for m in members]
        self.calls.wait(stacks, len(stacks), _ASK_SECONDS)
        reports = {m.name: _report(self.calls, m, question) for m, question in zip(members, stacks, strict=True)}
        start = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(time.time() - self.seconds))
        lines = [self.headline, f"Since {start}.", "", "What to look at"]
        lines += [f"- {hint}" for hint in self._hints(reports)]
        for member in members:
            lines += ["", f"{'=' * 8} {member.name} ({member.location})", reports[member.name]]
        if remainder:
            lines += ["", f"... and {len(remainder)} more pending workers: {', '.join(m.name for m in remainder)}"]
        if log := self.member.facts.get("stderr"):
            lines += ["", f"{'=' * 8} The end of its standard error ({log})"]
            lines.append(self.member.on_its_node(log_tail, log, _LOG_LINES))
        return "\n".join(lines) + "\n"

    def _hints(self, reports: dict[str, str]) -> list[str]:
        report = reports[self.member.name]
        hints = []
        if "T (stopped)" in report:
            hints.append(
                "The process is stopped (SIGSTOP, a debugger, a suspended terminal): find out on its node what stopped "
                "it. The process ends with the run; resume the run."
            )
        elif "D (disk sleep)" in report:
            hints.append(
                "It waits in the kernel, usually for a disk or a network file system: look at the node's dmesg."
            )
        elif "State: gone" in report:
            hints.append("The process is gone: look at the node's dmesg for the out-of-memory killer.")
        elif report.startswith("(node"):
            hints.append("Its node does not answer: look at the node and its network.")
        elif self.silent:
            hints.append("Its threads cannot run: something holds Python's interpreter lock, see the innermost frames.")
        if any(name in report for name in _COLLECTIVES):
            hints.append(
                "It waits for other ranks in a collective. Find the rank that is in another function, or that is not "
                "listed below because it has finished: ranks that call the model different numbers of times hang."
            )
        elif not self.silent:
            hints.append("Look at the innermost frame of the thread `work` below.")
        if not self.silent:
            hints.append("If it is only slow, give it more time with launcher.stall_timeout.")
        hints.append("Continue from the newest checkpoint with --resume.")
        return hints


def _report(calls: Calls, member: WorkerHandle, question: Any) -> str:
    """The worker's stacks. If it does not respond, what its node can see of the process."""
    if calls.wait([question], timeout=0.0)[0]:
        try:
            stacks: dict[str, str] = dict(calls.get(question))
        except CallFailed as cause:
            return f"(it is dead: {cause})"
        first = stacks.pop("")
        ordered = sorted(stacks.items(), key=lambda item: (item[0] != "work", item[0]))
        return "\n".join([first, *(f"\nthread {name!r}, innermost frame last:\n{text}" for name, text in ordered)])
    if "pid" not in member.facts:
        return "(it has not started)"
    return "It does not respond. Seen from outside:\n" + member.on_its_node(inspect_process, member.facts["pid"])
