"""Refuses classes of trainers and generators whose optional methods nothing would call.

These methods once belonged to ``Trainer`` and ``Generator``, and strings in ``capabilities`` said which of them a class
implements. Now a class derives from an :class:`rlhf.interfaces.Ability` with these methods.
"""

from __future__ import annotations

from typing import Any

from rlhf.errors import PluginInvalid

_ABILITIES = {
    "trainer": (
        "SharesModule",
        "SendsWeights",
        "TakesWeights",
        "Offloads",
        "HasViews",
        "LendsHead",
        "RestartsOptimizer",
    ),
    "generator": ("TakesModule", "TakesTensors", "AnswersRequests", "Sleeps"),
}
_CAPABILITIES = {
    "export:module": "SharesModule",
    "export:tensors": "SendsWeights",
    "lend:head": "LendsHead",
    "accept:module": "TakesModule",
    "accept:tensors": "TakesTensors",
    "answers": "AnswersRequests",
    "sleep": "Sleeps",
}
"""{former string in ``capabilities``: the ability that replaces it}."""


def check_abilities(kind: str, cls: type[Any], label: str) -> None:
    """Raises PluginInvalid, with the bases that a trainer or generator needs, if it has methods or capabilities of an
    ability and does not derive from it."""
    if kind not in _ABILITIES:
        return
    from rlhf import interfaces

    reasons: dict[str, list[str]] = {}
    for name in _ABILITIES[kind]:
        ability = getattr(interfaces, name)
        if not issubclass(cls, ability):
            methods = [f"{n}()" for n in vars(ability) if not n.startswith("_") and hasattr(cls, n)]
            strings = [repr(c) for c in sorted(cls.capabilities) if _CAPABILITIES.get(c) == name]
            if strings or methods:
                reasons[name] = [*strings, *methods]
    pool = _pool_methods(cls) if kind == "generator" else []
    if not reasons and not pool:
        return
    problems = []
    if reasons:
        bases = [*reasons, *(b.__name__ for b in cls.__bases__)]
        listing = ", ".join(f"{name} for {' and '.join(parts)}" for name, parts in reasons.items())
        problems.append(
            f" Write class {cls.__name__}({', '.join(bases)}), with the classes of rlhf.interfaces for what it can do "
            f"({listing}), and remove the quoted words from `capabilities`."
        )
    if pool:
        problems.append(f" Remove {', '.join(pool)}, which only a launcher's rlhf.interfaces.EnginePool has.")
    raise PluginInvalid(
        f"{label}: {cls.__module__}.{cls.__qualname__} has methods or capabilities that nothing would use."
        + "".join(problems)
    )


def _pool_methods(cls: type[Any]) -> list[str]:
    """The methods of a class that only a pool of engines has."""
    from rlhf.interfaces import AnswersRequests, EnginePool

    names = [n for n in vars(EnginePool) if not n.startswith("_") and not hasattr(AnswersRequests, n)]
    return [f"{n}()" for n in names if hasattr(cls, n)]
