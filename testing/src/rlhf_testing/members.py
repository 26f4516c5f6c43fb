"""Compares the members of a class with those of its interface: misspelled names, wrong signatures, taken options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any


def misspelled(cls: type[Any], base: type[Any]) -> list[tuple[str, str]]:
    """[(a public name that ``cls`` defines, a similarly spelled member of the interface ``base`` that ``cls`` does not
    override)]. Example: ``step_finish``, where the runtime calls ``step_finished``."""
    optional = [
        n
        for n in dir(base)
        if not n.startswith("_") and inspect.getattr_static(cls, n) is inspect.getattr_static(base, n)
    ]
    own = [n for n in vars(cls) if not n.startswith("_") and not hasattr(base, n)]
    pairs = [(n, difflib.get_close_matches(n, optional, n=1, cutoff=0.8)) for n in own]
    return [(n, match[0]) for n, match in pairs if match]


def uncallable(cls: type[Any], base: type[Any]) -> Iterator[str]:
    """Problems with methods of ``cls`` that the interface ``base`` declares differently: other arguments, plain instead
    of ``async``, or a method instead of a property."""
    for name in dir(base):
        theirs, ours = inspect.getattr_static(base, name), inspect.getattr_static(cls, name)
        if theirs is ours or (name.startswith("_") and name != "__call__"):
            continue
        if isinstance(theirs, property) and inspect.isfunction(ours):
            yield f"{cls.__name__}.{name} is read without a call: put @property above it"
        if not (inspect.isfunction(theirs) and inspect.isfunction(ours)):
            continue
        signature = inspect.signature(theirs)
        parameters = [
            p for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        try:
            inspect.signature(ours).bind(*parameters)
        except TypeError as error:
            yield (
                f"{cls.__name__}.{name}{_parameters(inspect.signature(ours))} is called as "
                f"{name}{_parameters(signature)}: {error}"
            )
        if inspect.iscoroutinefunction(theirs) and not inspect.iscoroutinefunction(ours):
            yield f"{cls.__name__}.{name} is awaited: write `async def {name}`"


def taken_fields(cls: type[Any], kind: str) -> dict[str, str]:
    """{field of ``cls.Config``: who reads it} for names that the run file's section or an algorithm's slot already
    uses."""
    from rlhf_runtime.config.runfile import LISTS, SINGLE

    section = {**SINGLE, **LISTS}.get(kind)
    own = set(section.model_fields) if section is not None else {"use"}
    readers = dict.fromkeys(own, f"the section of the {kind} itself")
    readers |= {name: f"the slot {name!r}" for name in getattr(cls, "slots", {})}
    return {name: readers[name] for name in cls.Config.model_fields if name in readers}


def _parameters(signature: inspect.Signature) -> str:
    return f"({', '.join(signature.parameters)})"
