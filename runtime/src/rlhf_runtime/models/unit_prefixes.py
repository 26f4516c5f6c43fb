"""How many tokens units compute where they share prefixes (:mod:`rlhf.ops.prefixes`)."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf.ops.batch import Batch
from rlhf.ops.prefixes import content_ids, sorted_by_prefix, worth_sharing


@dataclass(frozen=True, slots=True)
class UnitPrefixes:
    """Number of computed tokens of units, alone and next to each other."""

    tokens: list[int]
    """[U]: computed tokens of each unit alone."""
    order: list[int]
    """The units, ordered so that units that share a prefix are neighbours."""
    shared: list[int]
    """[U]: tokens that unit ``order[i]`` need not compute if ``order[i - 1]`` is in the same micro-batch. All are zero
    if the total is too small to matter."""


def unit_prefixes(batch: Batch) -> UnitPrefixes:
    """The computed tokens of every unit, and an order in which units share prefixes. ``batch`` is on the CPU."""
    lens, starts = batch.lens_B.tolist(), batch.starts_B.tolist()
    ids_N = content_ids(batch.ids_N, lens, batch.images_B)
    units = batch.unit_B.tolist()
    tokens = batch.tokens_per_unit()
    first: dict[int, int] = {}
    for b, unit in enumerate(units):
        first.setdefault(unit, b)
    if len(first) < len(lens):
        order, fronts = sorted_by_prefix(ids_N, starts, lens, range(len(lens)), units)
        for b, front in zip(order, fronts, strict=True):
            tokens[units[b]] -= front
    order, fronts = sorted_by_prefix(ids_N, starts, lens, list(first.values()))
    if not worth_sharing(batch.tokens - sum(tokens) + sum(fronts), batch.tokens):
        return UnitPrefixes(batch.tokens_per_unit(), list(range(batch.units)), [0] * batch.units)
    return UnitPrefixes(tokens, [units[b] for b in order], fronts)
