"""Finds options without effect: each option that a config of the grid sets must change the computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from rlhf_testing.contract import Contract, expect, set_options


def check_options(contract: Contract, effect: Callable[[Any], Any]) -> None:
    """Fails if ``effect`` of a config equals the effect of the same config with one option at its default.

    Options named in :attr:`Contract.without_effect` are not checked. Neither are options that cannot be at their
    default because the config's other options forbid it.

    Args:
        effect: returns what a config computes: tensors, numbers and texts in tuples, lists and mappings.
    """
    for config in contract.grid():
        excused = contract.without_effect
        options = [p for p in set_options(config) if not {p, f"{p} = {_option(config, p)!r}"} & excused.keys()]
        effect_of_config = effect(config) if options else None
        for path in options:
            plain = config_without(config, [path])
            if plain is None:
                section = path.partition(".")[0]
                plain = config_without(config, [p for p in set_options(config) if p.partition(".")[0] == section])
            expect(
                plain is None or not equal_effects(effect_of_config, _effect_or_none(effect, plain)),
                f"{contract.label(config)} {path} changes nothing: credit, gradients and what is trained are the "
                f"same as with its default. Read it, or refuse it in Config where it has no effect. If it acts "
                f"elsewhere, or only on data that the suite lacks, declare it: without_effect = {{{path!r}: 'why'}}",
            )


def _effect_or_none(effect: Callable[[Any], Any], config: Any) -> Any:
    """The effect; None if the suite's data does not suit this config. None also counts as a different effect."""
    try:
        return effect(config)
    except Exception:
        return None


def config_without(config: BaseModel, paths: list[str]) -> Any | None:
    """The config with these options at their defaults; None if the other options forbid it."""
    values = {path: _option(config, path) for path in set_options(config) if path not in paths}
    values |= {n: getattr(config, n) for n, info in type(config).model_fields.items() if info.is_required()}
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    try:
        return type(config).model_validate(nested)
    except ValidationError:
        return None


def _option(config: BaseModel, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def equal_effects(a: Any, b: Any) -> bool:
    """Whether two effects are the same, tensors bit for bit."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        same_kind = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.dtype == b.dtype
        return same_kind and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal_effects(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal_effects(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
