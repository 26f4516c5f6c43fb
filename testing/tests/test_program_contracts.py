"""The suites of commands, checks and backends see what breaks their rules."""

from __future__ import annotations

import pytest
from rlhf.interfaces import Backend, Check, Command, ComponentConfig, Finding
from rlhf_testing.conformance import run


class Selected:
    def __init__(self, kind, cls):
        self.kind, self.name, self.cls = kind, cls.name, cls


def failed(kind, cls):
    """{check: detail} of the checks that fail."""
    return {r.name: r.detail for r in run(Selected(kind, cls)) if not r.passed}


class Hello(Command):
    """Say hello."""

    name = "hello"
    conformance = {"calls": [(["--loud"], 0)]}

    def add_arguments(self, parser):
        parser.add_argument("--loud", action="store_true")

    def run(self, args):
        return 0


def arguments(*names, **options):
    """``add_arguments`` that adds one argument."""

    def add_arguments(self, parser):
        parser.add_argument(*names, **options)

    return {"add_arguments": add_arguments}


COMMANDS = {
    "a percent sign in a help text": (arguments("--loud", action="store_true", help="100 % louder"), "arguments", "%%"),
    "the flag of the program": (arguments("--traceback", action="store_true"), "arguments", "--traceback"),
    "the name of the flags of the run file": (
        {"run_file_flags": True, **arguments("--overrides")}, "arguments", "`overrides`",
    ),
    "an error while arguments are added": (arguments("bad name", "--x"), "arguments", "add_arguments() raised"),
    "no exit code": ({"run": lambda self, args: None}, "calls", "returned None, expected the exit code 0"),
    "a truth value for an exit code": ({"run": lambda self, args: False}, "calls", "returned False"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", COMMANDS)
def test_mistakes_of_a_command(mistake):
    attributes, check, says = COMMANDS[mistake]
    problems = failed("command", type("Wrong", (Hello,), {"__doc__": "Wrong.", **attributes}))
    assert says in problems[check]


class Desk(Backend):
    """This machine."""

    name = "desk"
    launcher, trainer, generator = "local", "torch", "transformers"


BACKENDS = {
    "no trainer": ({"trainer": ""}, "references", "trainer is ''"),
    "a text that is no reference": ({"generator": "My Engine"}, "references", "is not a reference"),
}


@pytest.mark.parametrize("mistake", BACKENDS)
def test_mistakes_of_a_backend(mistake):
    attributes, check, says = BACKENDS[mistake]
    problems = failed("backend", type("Wrong", (Desk,), {"__doc__": "Wrong.", **attributes}))
    assert says in problems[check]


@pytest.mark.parametrize(("kind", "cls"), [("command", Hello), ("backend", Desk)])
def test_options_of_what_has_none_are_a_mistake(kind, cls):
    problems = failed(kind, type("Wrong", (cls,), {"__doc__": "Wrong.", "Config": ComponentConfig}))
    assert problems["class"] == f"Wrong has a Config, but a {kind} has no options: remove it"


class Fine(Check):
    """Finds nothing wrong."""

    name = "fine"

    def examine(self, examination):
        return [Finding("fine", "ok", "as it should be")]


def report_one(argument, report):
    report(1)


def probing(examination):
    """Reads the value of a probe without looking at its error."""
    return [Finding("fine", "ok", str(examination.ask(report_one).value))]


def careless(examination):
    """Takes a probe that did not finish for a good one."""
    examination.ask(report_one)
    return [Finding("fine", "ok", "as it should be")]


CHECKS = {
    "nothing found": (lambda examination: [], "findings", "returned no finding"),
    "a text for a finding": (lambda examination: ["fine"], "findings", "expected a Finding"),
    "a finding without text": (lambda examination: [Finding("fine", "ok", "")], "findings", "needs a name"),
    "a warning without a remedy": (lambda examination: [Finding("fine", "warn", "odd")], "findings", "what to do"),
    "a status of its own": (lambda examination: [Finding("fine", "good", "odd")], "findings", "allowed are"),
    "a value of a probe that was killed": (probing, "a_failing_probe_is_a_finding", "raised IndexError"),
    "a probe that was killed, and nothing said": (
        careless,
        "a_failing_probe_is_a_finding",
        "no finding has the status 'warn' or 'fail'",
    ),
}


@pytest.mark.parametrize("mistake", CHECKS)
def test_mistakes_of_a_check(mistake):
    examine, check, says = CHECKS[mistake]
    attributes = {"__doc__": "Wrong.", "examine": lambda self, examination: examine(examination)}
    problems = failed("check", type("Wrong", (Fine,), attributes))
    assert says in problems[check]


@pytest.mark.parametrize(("kind", "cls"), [("command", Hello), ("backend", Desk), ("check", Fine)])
def test_good_ones_pass(kind, cls):
    assert failed(kind, cls) == {}
