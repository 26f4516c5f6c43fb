"""Checks: lines of the report of ``rlhf doctor``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf.interfaces.component import Component

Status = Literal["ok", "warn", "fail", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "skipped")

Probe = Callable[[Any, Callable[[Any], None]], None]
"""``probe(argument, report)``: a function at the top of an importable module, run in a child process. ``argument`` and
what it reports, value by value, are JSON values. What it raises is the answer's ``error``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    """What was checked, such as ``memory``; a user and a page find the check by it."""
    status: Status
    """``fail``: a run will not work. ``warn``: it may not work, or slowly. ``skipped``: not checked, for the reason in
    ``found``."""
    found: str
    """What was found."""
    remedy: str = ""
    """What to do; required for ``warn`` and ``fail``."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"the finding {self.name!r} has the status {self.status!r}; allowed are {STATUSES}")
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"the finding {self.name!r} is {self.status!r} and says nothing about what to do")


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a probe reported."""

    seconds: float
    """How long the child process ran."""
    error: str = ""
    """Why the probe did not finish; empty where it did."""
    log: str = field(default="", repr=False)
    """The end of what it printed, its traceback included."""
    values: list[Any] = field(default_factory=list)
    """What it reported, in order; values from before an error are kept."""

    @property
    def value(self) -> Any:
        """The last value. The probe must have finished."""
        return self.values[-1]


class Ask(Protocol):
    """``ask(probe, argument) -> ProbeAnswer``: run a probe in a child process with a deadline."""

    def __call__(self, probe: Probe, argument: Any = None, /) -> ProbeAnswer: ...


@dataclass(frozen=True, slots=True)
class Examination:
    """What a check is given."""

    ask: Ask
    """Runs a probe in a child process and ends it at its deadline. Import in a probe what is heavy or may crash: a
    broken package is then one failed line."""
    timeout: float = 120.0
    """Seconds for one probe."""
    start: bool = False
    """Whether the user allows to start something for a moment (``rlhf doctor --start``)."""
    launcher: str | None = None
    """Name of the run's launcher; None where no run is examined."""
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the launcher, from the run file and flags; also where flags alone give them."""
    shared_paths: tuple[str, ...] = ()
    """Files and folders that every machine of the run must read."""


class Check(Component):
    """A check of ``rlhf doctor``, offered by the distribution that knows what it needs.

    All installed checks are asked, in order of their names, after those of the doctor itself. Import at the top of the
    module what is light, and in a probe the rest. Complete example::

        from rlhf import hookimpl
        from rlhf.interfaces import Check, Finding

        def version(argument, report):
            import mylibrary

            report(mylibrary.__version__)

        class MyLibrary(Check):
            \"\"\"Whether mylibrary can be imported.\"\"\"

            name = "mylibrary"

            def look(self, examination):
                answer = examination.ask(version)
                if answer.error:
                    return [Finding("mylibrary", "fail", answer.error, "pip install mylibrary again")]
                return [Finding("mylibrary", "ok", f"{answer.value}, imported in {answer.seconds:.1f} s")]

        @hookimpl
        def rlhf_register_check():
            return [MyLibrary]

    In ``pyproject.toml``::

        [project.entry-points."rlhf.check"]
        mylibrary = "my_package.checks"
    """

    @abstractmethod
    def look(self, examination: Examination) -> Iterable[Finding]:
        """The findings, in order. What is wrong with the machine is a finding, never an exception; what this raises is
        reported as a failed check."""
