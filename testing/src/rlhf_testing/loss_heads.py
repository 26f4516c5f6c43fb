"""Checks of what a loss declares to read: outputs, columns, and heads of its own."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rlhf.interfaces.loss import Loss
from rlhf.ops.heads import BUILTIN
from rlhf.types import Head
from torch import Tensor

from rlhf_testing import fabricate
from rlhf_testing.compare import same_bits
from rlhf_testing.contract import Nonconformance, expect
from rlhf_testing.loss_case import LEAF, LossCase

CHUNK = 3
"""Tokens per chunk. Trainers use thousands."""
TOLERANCE = 1e-5
"""Relative to the largest value. A matrix product of fewer rows adds in a different order."""


class Declared(dict[str, Any]):
    """A head's columns. Reading a column that the head does not declare fails with the column's name."""

    def __init__(self, head: Head, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._head = head

    def __missing__(self, name: str) -> Any:
        raise Nonconformance(
            f"head {self._head.name!r} reads the column {name!r}; it declares {list(self._head.columns)}: "
            f"Head(..., columns=({name!r},))"
        )


def check_declared(about: str, loss: Loss, again: Loss) -> None:
    """Checks that the declarations are tuples of names and Heads, each once, and equal in another instance."""
    for method in ("outputs", "columns"):
        declaration = getattr(loss, method)()
        expect(
            isinstance(declaration, tuple | list),
            f'{about} {method}() returns {declaration!r:.60}; it must be a tuple, of one name too: ("logprobs",)',
        )
    heads = [output for output in loss.outputs() if isinstance(output, Head)]
    names = Counter(output.name if isinstance(output, Head) else output for output in loss.outputs())
    for name, count in names.items():
        expect(count == 1, f"{about} outputs() names {name!r} {count} times: x[{name!r}] is one of them")
    for head in heads:
        own = head.name not in BUILTIN or head.fn is BUILTIN[head.name].fn
        expect(own, f"{about} a head of its own is called {head.name!r}, as a built-in one: choose another name")
    fns = {output.name: output.fn for output in again.outputs() if isinstance(output, Head)}
    for head in heads:
        expect(
            fns.get(head.name) is head.fn or fns.get(head.name) == head.fn,
            f"{about} the function of head {head.name!r} is another one in each call of outputs(): define it once, "
            "outside of outputs() (a function made inside is new in every call and cannot be pickled)",
        )
    declared, other = ([f(each) for f in _PARTS] for each in (loss, again))
    expect(declared == other, f"{about} outputs(), columns() and reduce() must be functions of the config alone")


_PARTS = (lambda loss: loss.outputs(), lambda loss: loss.columns(), lambda loss: loss.reduce())


def check_head(about: str, case: LossCase, head: Head) -> None:
    """Checks a head of the loss's own: one row of float32 values per token, which depends on that token alone."""
    label = f"{about} head {head.name!r}"
    try:
        inspect.signature(head.fn).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        raise Nonconformance(f"{label} is called as fn(logits_CV, ids_C, columns, constants): {error}") from error
    batch = case.batch
    mask_N = batch.tok[head.over]
    inputs, ids = batch.tok[LEAF + head.name][mask_N].detach(), batch.ids_N[mask_N]
    columns = {name: batch.tok[name][mask_N] for name in head.columns}
    constants = {**head.constants, **{role: fabricate.output_head(role, case.seed) for role in head.lent}}

    def values(rows: Sequence[int]) -> Tensor:
        at = torch.tensor(rows)
        chunk = inputs[at]
        version, declared = chunk._version, Declared(head, {k: v[at] for k, v in columns.items()})
        chunk_values = head.fn(chunk, ids[at], declared, constants)
        right = isinstance(chunk_values, Tensor) and chunk_values.ndim >= 1 and chunk_values.shape[0] == len(rows)
        shape = tuple(chunk_values.shape) if isinstance(chunk_values, Tensor) else type(chunk_values).__name__
        expect(
            right, f"{label} must give [{len(rows)}, ...] for {len(rows)} tokens, got {shape}: nothing over all tokens"
        )
        expect(chunk._version == version, f"{label} changes in place what it reads, and other heads too: .clone() it")
        return chunk_values

    order = list(range(len(ids)))
    whole = values(order)
    low = whole.is_floating_point() and torch.finfo(whole.dtype).bits < 32
    expect(not low, f"{label} gives {whole.dtype}: what it reads is float32, and so are its values")
    bad = int((~torch.isfinite(whole.float())).sum())
    expect(not bad, f"{label} gives {bad} values that are not finite, for ordinary input between -3 and 3")
    expect(same_bits(whole, values(order)), f"{label} gives other values on the second call: keep it pure")
    chunks = torch.cat([values(order[i : i + CHUNK]) for i in range(0, len(order), CHUNK)])
    apart = float((chunks.double() - whole.double()).abs().max())
    expect(
        apart <= TOLERANCE * max(1e-12, float(whole.double().abs().max())),
        f"{label} depends on which tokens share a chunk (by {apart:.1e}): it is called chunk by chunk, so a value may "
        "depend on its own token only; put what depends on the batch into a column (Loss.prepare)",
    )
