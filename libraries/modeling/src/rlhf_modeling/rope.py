"""Rotary embeddings whose frequencies depend on the length of the sequence: ``longrope`` and ``dynamic``.

transformers chooses the frequencies of a call by its largest position. So sequences of different kinds must not be
computed in one call (:meth:`LengthRope.kind`).

``longrope`` (Ding et al. 2024, arXiv:2402.13753; Phi-3 with 128k, Phi-4-mini): one set of frequencies up to the
original length, another set beyond it. ``dynamic`` (NTK-aware scaling): beyond the original length, each length has
different frequencies, and transformers reuses the frequencies of the longest sequence so far.
:meth:`LengthRope.forgotten` resets them, so that a sequence's result does not depend on earlier calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LengthRope:
    original: int
    """Sequences of up to this many tokens have the plain frequencies."""
    modules: tuple[Any, ...]
    """The rotary embeddings of type ``dynamic``; empty for ``longrope``."""

    def kind(self, length: int) -> int:
        """Sequences of one kind may be computed in one call."""
        if length <= self.original:
            return 0
        return length if self.modules else 1

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Forget the longest sequence so far, at the start and at the end of the context."""
        self._forget()
        try:
            yield
        finally:
            self._forget()

    def _forget(self) -> None:
        for module in self.modules:
            # If layers have different types, transformers puts the type before the names of these attributes.
            for name in [n for n in vars(module) if n.endswith("max_seq_len_cached")]:
                setattr(module, name, module.original_max_seq_len)
            for name, buffer in list(module.named_buffers(recurse=False)):
                if name.endswith("original_inv_freq"):
                    plain = name.replace("original_", "")
                    setattr(module, plain, buffer.to(getattr(module, plain).device).clone())


def length_rope(model: nn.Module) -> LengthRope | None:
    """The length-dependent rotary embeddings of ``model``; None if there are none."""
    lengths: list[int] = []
    dynamic: list[Any] = []
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str) or not hasattr(module, "config"):
                continue
            if kind == "longrope":
                parameters = module.config.rope_parameters
                lengths.append((parameters if layer is None else parameters[layer])["original_max_position_embeddings"])
            elif "dynamic" in kind:
                lengths.append(module.original_max_seq_len)
                dynamic.append(module)
    return LengthRope(min(lengths), tuple(dynamic)) if lengths else None
