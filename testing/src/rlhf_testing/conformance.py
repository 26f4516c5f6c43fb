"""Runs the suites without pytest, for ``rlhf plugins check NAME``."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import io
import os
import sys
import traceback
import unittest
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from rlhf.errors import PluginInvalid
from rlhf.plugins.resolved import FILE, IN_PROCESS
from rlhf.secrets import names_secret

from rlhf_testing.contract import Contract, PluginContract

SUITES: dict[str, tuple[str, str]] = {
    kind: (f"rlhf_testing.{kind}", f"{kind.title()}Contract")
    for kind in (
        "algorithm", "advantage", "loss", "curriculum", "rollout", "reward", "env", "trainer", "generator", "launcher",
        "observer", "adapter", "backend", "command", "check",
    )
}  # fmt: skip
"""{kind: (module, class)}. The modules are imported on demand, because most of them import torch."""

ATTRIBUTE = "conformance"
"""A component class may hold a mapping of suite attributes under this name: ``{"rows": [...]}``, ``{"columns": ...}``,
``{"statement": function}``. A suite class in a test file sets the same attributes. In a file with a reward function,
the mapping is a variable of the module."""


class Selected(Protocol):
    """The plugin to check: a :class:`rlhf.plugins.Resolved`, or any object with these three attributes."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def cls(self) -> type[Any]: ...


DECOY = "RLHF_CHECK_API_KEY"
"""An environment variable that is set during the checks, to detect a plugin that prints the whole environment."""
_SHORTEST = 8
"""Minimum characters of a secret's value. Shorter values may occur in a text by chance."""
SECRETS = "secrets"
"""Name of the last check: the output and errors of the other checks contain no secret."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one plugin."""

    name: str
    """Name of the test method without ``test_``, for example ``split_invariance``."""
    passed: bool
    """Also True for a skipped check, which needs something that the author did not supply (see ``detail``)."""
    detail: str
    """What the check proves. If it failed: what is wrong. If it was skipped: what it needs."""
    skipped: bool = False


class Hearing:
    """Passes on a plugin's output during the checks, with secrets replaced. ``leaks`` holds the variables whose values
    were printed."""

    def __init__(self) -> None:
        self.leaks: set[str] = set()
        values = {name: value for name, value in os.environ.items() if names_secret(name) and len(value) >= _SHORTEST}
        self.secrets = {**values, DECOY: uuid.uuid4().hex}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        out, err = _Passing(self, sys.stdout), _Passing(self, sys.stderr)
        os.environ[DECOY] = self.secrets[DECOY]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                yield
        finally:
            os.environ.pop(DECOY, None)

    def hide(self, text: str) -> str:
        """The text with ``$NAME`` in place of each secret. The names are added to ``leaks``."""
        for name, value in self.secrets.items():
            if value in text:
                self.leaks.add(name)
                text = text.replace(value, f"${name}")
        return text


class _Passing(io.TextIOBase):
    """A stream that passes text on, without secrets."""

    def __init__(self, hearing: Hearing, target: TextIO) -> None:
        self._hearing, self._target = hearing, target

    def write(self, text: str) -> int:
        self._target.write(self._hearing.hide(text))
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def fileno(self) -> int:
        return self._target.fileno()

    def isatty(self) -> bool:
        return self._target.isatty()


def suite(kind: str) -> type[PluginContract]:
    """The suite class of a kind. Raises PluginInvalid for an unknown one."""
    if kind not in SUITES:
        raise PluginInvalid(f"there is no conformance suite for kind {kind!r}; kinds are {sorted(SUITES)}")
    module, name = SUITES[kind]
    return getattr(importlib.import_module(module), name)


def check_names(kind: str) -> list[str]:
    """The names of all checks that :func:`run` does for a kind, in its order."""
    return [*(_short(name) for name in _methods(suite(kind))), SECRETS]


def run(
    resolved: Selected, progress: Callable[[CheckResult], None] = lambda result: None, name_part: str = ""
) -> list[CheckResult]:
    """The checks of the kind's suite on ``resolved.cls``, with its default config.

    Args:
        progress: called after each check.
        name_part: run the checks whose names (:func:`check_names`) contain this text; empty: run all checks.

    An exception in one check does not stop the others. Warnings are not shown.
    """
    contract = suite(resolved.kind)
    attributes = dict(getattr(resolved.cls, ATTRIBUTE, {}))
    unknown = sorted(a for a in attributes if not hasattr(contract, a))
    if unknown:
        raise PluginInvalid(
            f"{resolved.kind} {resolved.name!r}: {resolved.cls.__name__}.{ATTRIBUTE} sets {unknown}, which "
            f"{contract.__name__} does not define; it defines "
            f"{sorted(a for a in dir(contract) if not a.startswith('_'))}"
        )
    packaged = getattr(resolved, "distribution", "") not in ("", FILE, IN_PROCESS)
    namespace = {"registered": packaged, **attributes, contract.kind: resolved.cls, "__module__": __name__}
    instance = type(f"{resolved.cls.__name__}Contract", (contract,), namespace)()
    results: list[CheckResult] = []

    def report(result: CheckResult) -> None:
        if name_part in result.name:
            results.append(result)
            progress(result)

    hearing = Hearing()
    for name in _methods(contract):
        if name_part not in _short(name) and name_part not in SECRETS:  # SECRETS needs the output of all checks
            continue
        with hearing():
            result = _run(name, getattr(instance, name), resolved.cls)
        report(replace(result, detail=hearing.hide(result.detail)))
    report(_secrets(hearing))
    return results


def _secrets(hearing: Hearing) -> CheckResult:
    if not hearing.leaks:
        return CheckResult(SECRETS, True, "Nothing that is printed or raised holds a secret of the environment.")
    names = ", ".join("the whole environment" if name == DECOY else f"${name}" for name in sorted(hearing.leaks))
    message = f"What it prints or raises shows {names}. Logs are kept and shared, so they must not hold secrets."
    return CheckResult(SECRETS, False, message)


def _methods(contract: type[PluginContract]) -> Iterator[str]:
    """Names of the test methods: first the checks of every component, then the others in the order of the source."""
    names: set[str] = set()
    first = [base for base in (PluginContract, Contract) if issubclass(contract, base)]
    for base in (*first, *reversed(contract.__mro__)):
        for name in vars(base):
            if name.startswith("test_") and name not in names:
                names.add(name)
                yield name


def _short(method: str) -> str:
    return method.removeprefix("test_")


def _first_paragraph(check: Callable[[], None]) -> str:
    """First paragraph of the docstring, on one line and as plain text."""
    return " ".join((inspect.getdoc(check) or "").partition("\n\n")[0].replace("``", "`").split())


def _run(name: str, check: Callable[[], None], cls: type[Any]) -> CheckResult:
    short = _short(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except unittest.SkipTest as left_out:
        return CheckResult(short, True, f"{left_out}", skipped=True)
    except AssertionError as failure:
        first: BaseException = failure
        while first.__cause__ is not None:
            first = first.__cause__
        place = _place(first, cls) if first is not failure else ""
        return CheckResult(short, False, (str(failure) or "an assertion without a message failed") + place)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the last two would end the other checks too
        return CheckResult(short, False, f"{type(error).__name__}: {error}{_place(error, cls)}")
    return CheckResult(short, True, _first_paragraph(check))


def _place(error: BaseException, cls: type[Any]) -> str:
    """The line of the plugin's own code that raised the error: `` (loss.py:12)``. Empty if other code raised it."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None) or inspect.getsourcefile(cls)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if file and f.filename == file]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
