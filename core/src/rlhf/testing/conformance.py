"""The suites without pytest: what ``rlhf plugins check NAME`` runs."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rlhf.errors import PluginInvalid
from rlhf.plugins.resolved import FILE, IN_PROCESS
from rlhf.testing.contract import Contract
from rlhf.testing.hearing import DECOY, Hearing

SUITES: dict[str, tuple[str, str]] = {
    kind: (f"rlhf.testing.{kind}", f"{kind.title()}Contract")
    for kind in (
        "algorithm", "advantage", "loss", "rollout", "reward", "env", "trainer", "generator", "launcher", "observer",
        "adapter",
    )
}  # fmt: skip
"""{kind: (module, class)}; imported when asked for, as most import torch."""

ATTRIBUTE = "conformance"
"""A component class may hold a mapping of suite attributes under this name: ``{"rows": [...]}``, ``{"columns": ...}``,
``{"statement": function}``. A test file's suite class sets the same attributes."""


class Selected(Protocol):
    """What is checked: a :class:`rlhf.plugins.Resolved`, or anything with these three."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def cls(self) -> type[Any]: ...


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one plugin."""

    name: str
    """Without ``test_``: ``split_invariance``."""
    passed: bool
    """Also True for a check that was left out, as the author did not supply what it needs; ``detail`` says what."""
    detail: str
    """What the check proves; where it failed, what is wrong."""
    skipped: bool = False


def suite(kind: str) -> type[Contract]:
    """The suite class of a kind. Raises PluginInvalid for an unknown one."""
    if kind not in SUITES:
        raise PluginInvalid(f"there is no conformance suite for kind {kind!r}; kinds are {sorted(SUITES)}")
    module, name = SUITES[kind]
    return getattr(importlib.import_module(module), name)


def run(resolved: Selected, progress: Callable[[CheckResult], None] = lambda result: None) -> list[CheckResult]:
    """Every check of the kind's suite on ``resolved.cls``, with its default config.

    ``progress`` is called after each. Nothing a plugin raises stops the others, and warnings are kept quiet.
    """
    contract = suite(resolved.kind)
    attributes = dict(getattr(resolved.cls, ATTRIBUTE, {}))
    unknown = sorted(a for a in attributes if not hasattr(contract, a))
    if unknown:
        raise PluginInvalid(
            f"{resolved.kind} {resolved.name!r}: {resolved.cls.__name__}.{ATTRIBUTE} sets {unknown}, which "
            f"{contract.__name__} does not know; it has {sorted(a for a in dir(contract) if not a.startswith('_'))}"
        )
    packaged = getattr(resolved, "distribution", "") not in ("", FILE, IN_PROCESS)
    made = {"registered": packaged, **attributes, contract.kind: resolved.cls, "__module__": __name__}
    instance = type(f"{resolved.cls.__name__}Contract", (contract,), made)()
    results, hearing = [], Hearing()
    for name, check in _checks(instance):
        with hearing():
            result = _run(name, check, resolved.cls)
        results.append(replace(result, detail=hearing.hide(result.detail)))
        progress(results[-1])
    results.append(_secrets(hearing))
    progress(results[-1])
    return results


def _secrets(hearing: Hearing) -> CheckResult:
    if not hearing.told:
        return CheckResult("secrets", True, "Nothing that is printed or raised holds a secret of the environment.")
    names = ", ".join("the whole environment" if name == DECOY else f"${name}" for name in sorted(hearing.told))
    return CheckResult("secrets", False, f"what it prints or raises shows {names}: logs are kept and passed on")


def _checks(instance: Contract) -> Iterator[tuple[str, Callable[[], None]]]:
    """The test methods, those of every component first, then in the order they are written."""
    seen: set[str] = set()
    for base in (Contract, *reversed(type(instance).__mro__)):
        for name in vars(base):
            if name.startswith("test_") and name not in seen:
                seen.add(name)
                yield name, getattr(instance, name)


def _run(name: str, check: Callable[[], None], cls: type[Any]) -> CheckResult:
    short, proves = name.removeprefix("test_"), (inspect.getdoc(check) or "").split("\n")[0]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except unittest.SkipTest as left_out:
        return CheckResult(short, True, f"left out, {left_out}", skipped=True)
    except AssertionError as failure:
        return CheckResult(short, False, str(failure) or "an assertion without a message failed")
    except Exception as error:
        return CheckResult(short, False, f"{type(error).__name__}: {error}{_place(error, cls)}")
    return CheckResult(short, True, proves)


def _place(error: BaseException, cls: type[Any]) -> str:
    """Where in the plugin's own code the error was raised: `` (loss.py:12)``; nothing where it was not raised there."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None) or inspect.getsourcefile(cls)
    own = [f for f in traceback.extract_tb(error.__traceback__) if file and f.filename == file]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
