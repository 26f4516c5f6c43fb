"""The conformance suite of checks.

::

    from rlhf_testing.check import CheckContract

    class TestMyCheck(CheckContract):
        check = MyCheck
        finds = ["mylibrary"]    # names of its findings on this machine, where they are known
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf.interfaces.check import Examination, Finding, Probe, ProbeAnswer

from rlhf_testing.contract import Nonconformance, PluginContract, expect, expect_light_import


class CheckContract(PluginContract):
    """Checks the findings of a check: on this machine, and if every probe fails."""

    kind = "check"
    check: Any = None
    finds: Sequence[str] = ()
    """Names of the findings on this machine, in order; not compared if empty."""

    def findings(self, examination: Examination) -> list[Finding]:
        """The findings that ``examine`` returns. Fails if their form is wrong."""
        try:
            findings = list(self.cls().examine(examination))
        except Exception as error:
            raise Nonconformance(
                f"{self.label()} examine() raised {type(error).__name__}: {error}. Report a fault of the machine as a "
                "finding with the status 'fail'"
            ) from error
        for finding in findings:
            expect(isinstance(finding, Finding), f"{self.label()} examine() returned {finding!r}; expected a Finding")
            texts = finding.name and finding.text
            expect(bool(texts), f"{self.label()} the finding {finding!r} needs a name and a text")
        return findings

    # ------------------------------------------------------------------------------------- checks

    def test_findings(self) -> None:
        """On this machine ``examine`` returns findings, each with a name, a status, what was found and what to do."""
        findings = self.findings(Examination(ask=in_this_process))
        expect(
            bool(findings),
            f"{self.label()} examine() returned no finding; a check that does not apply returns one with the status "
            "'skipped'",
        )
        names = [finding.name for finding in findings]
        expected = not self.finds or names == list(self.finds)
        expect(expected, f"{self.label()} the findings here are {names}; expected: {list(self.finds)}")

    def test_a_failing_probe_is_a_finding(self) -> None:
        """Where a probe does not finish, ``examine`` reports a finding and does not raise."""
        probes = []

        def fails(probe: Probe, argument: Any = None, /) -> ProbeAnswer:
            probes.append(probe)
            return ProbeAnswer(1.0, "killed by SIGSEGV", "the end of what it printed")

        findings = self.findings(Examination(ask=fails))
        warns = any(f.status in ("fail", "warn") for f in findings) or not probes
        expect(warns, f"{self.label()} a probe was killed, but no finding has the status 'warn' or 'fail': {findings}")

    def test_import_is_light(self) -> None:
        """Importing the check's module imports no framework, because a broken framework would end the report. Probes
        import them."""
        if self.registered:
            expect_light_import(self.label(), self.cls.__module__, "import them in a probe")


def in_this_process(probe: Probe, argument: Any = None, /) -> ProbeAnswer:
    """Run a probe here, without a child process."""
    values: list[Any] = []
    try:
        probe(argument, values.append)
    except Exception as error:
        return ProbeAnswer(0.0, f"{type(error).__name__}: {error}", "", values)
    return ProbeAnswer(0.0, "" if values else "ended without an answer", "", values)
