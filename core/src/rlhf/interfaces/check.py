"""Checks: lines of the report of ``rlhf doctor``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhf.interfaces.extension import Extension

Status = Literal["ok", "warn", "fail", "skipped"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail", "skipped")

Probe = Callable[[Any, Callable[[Any], None]], None]
"""``probe(argument, report)``: a function at the top level of an importable module, run in a child process.
``argument`` and every value passed to ``report`` are JSON values. An exception becomes :attr:`ProbeAnswer.error`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    """Name of the checked thing, such as ``memory``. Users and documentation refer to the check by it."""
    status: Status
    """``fail``: a run will not work. ``warn``: it may not work, or slowly. ``skipped``: not checked, for the reason in
    ``text``."""
    text: str
    """What was found."""
    remedy: str = ""
    """What to do; required for ``warn`` and ``fail``."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"the finding {self.name!r} has the status {self.status!r}; allowed are {STATUSES}")
        if self.status in ("warn", "fail") and not self.remedy:
            raise ValueError(f"the finding {self.name!r} is {self.status!r} but does not say what to do")


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What a probe reported."""

    seconds: float
    """Run time of the child process."""
    error: str = ""
    """Why the probe did not finish; empty if it did."""
    log: str = field(default="", repr=False)
    """The end of the probe's output, including its traceback."""
    values: list[Any] = field(default_factory=list)
    """The reported values, in order. Values that were reported before an error are kept."""

    @property
    def value(self) -> Any:
        """The last value. The probe must have finished."""
        return self.values[-1]


class Ask(Protocol):
    """``ask(probe, argument) -> ProbeAnswer``: run a probe in a child process with a deadline."""

    def __call__(self, probe: Probe, argument: Any = None, /) -> ProbeAnswer: ...


@dataclass(frozen=True, slots=True)
class Examination:
    """The input of a check."""

    ask: Ask
    """Runs a probe in a child process and ends it at its deadline. Import heavy or possibly broken packages inside a
    probe, so that a broken package gives one failed line of the report."""
    timeout: float = 120.0
    """Seconds for one probe."""
    start: bool = False
    """Whether checks may briefly start services (``rlhf doctor --start``)."""
    launcher: str | None = None
    """Name of the run's launcher; None if no run is examined."""
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the launcher, from the run file and flags, or from flags alone."""
    shared_paths: tuple[str, ...] = ()
    """Files and folders that every machine of the run must read."""


class Check(Extension):
    """A check of ``rlhf doctor``, provided by the distribution whose requirements it checks.

    All installed checks run in order of their names, after the built-in ones. Import light modules at the top of the
    file, and heavy ones inside a probe. Complete example::

        from rlhf import hookimpl
        from rlhf.interfaces import Check, Finding

        def version(argument, report):
            import mylibrary

            report(mylibrary.__version__)

        class MyLibrary(Check):
            \"\"\"Whether mylibrary can be imported.\"\"\"

            name = "mylibrary"

            def examine(self, examination):
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
    def examine(self, examination: Examination) -> Iterable[Finding]:
        """The findings, in order. A problem of the machine is a finding, not an exception. An exception is reported as
        a failed check."""
