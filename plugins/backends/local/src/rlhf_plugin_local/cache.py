"""The key-value cache of the generator: one slot per row, written in place at each row's own position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of some tokens in one layer: [H, N, D] each (D may differ between keys and values)."""


@dataclass(slots=True)
class Step:
    """Where one decoding step writes and reads: the first ``rows`` slots, row r at ``position_S[r]``."""

    position_S: Tensor
    length: int
    """Positions that any of the rows attends to: the largest position + 1."""
    _index: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def index(self, heads: int, capacity: int) -> Tensor:
        """Flat index of (row, head, position) in [slots, H, capacity], int64 [S H]; built once for all layers."""
        if (heads, capacity) not in self._index:
            S, device = len(self.position_S), self.position_S.device
            first_SH = torch.arange(S * heads, device=device).view(S, heads) * capacity
            self._index[heads, capacity] = (first_SH + self.position_S[:, None]).flatten()
        return self._index[heads, capacity]


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: [slots, H, capacity, D]. Memory exists from the first prompt on."""

    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.step: Step | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kw: object) -> tuple[Tensor, Tensor]:
        """Write [S, H, 1, D] at each row's position; return views [S, H, length, D] of the first S slots."""
        step, S, H = self.step, *key_states.shape[:2]
        index = step.index(H, self.keys.shape[2])
        out = []
        for cache, new in ((self.keys, key_states), (self.values, value_states)):
            cache.view(-1, cache.shape[3]).index_copy_(0, index, new.reshape(S * H, -1).to(cache.dtype))
            out.append(cache[:S, :, : step.length])
        return out[0], out[1]

    def reserve(self, like: LayerKV, slots: int, capacity: int, used: int, dtype: torch.dtype | None) -> None:
        """Be exactly [slots, H, capacity, D], keeping what the first ``used`` slots hold."""
        for name, kv in zip(("keys", "values"), like, strict=True):
            old = getattr(self, name)
            new = kv.new_zeros(slots, kv.shape[0], capacity, kv.shape[2], dtype=dtype or kv.dtype)
            if old is not None and used:
                length = min(capacity, old.shape[2])
                new[:used, :, :length] = old[:used, :, :length]
            setattr(self, name, new)
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: :meth:`reserve` makes the memory before the first step."""

    def get_seq_length(self) -> int:
        return self.step.length - 1 if self.step else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """All layers. Grows in rows and in positions as rows need it; shrinks in rows whenever it grows in positions."""

    def __init__(self, layers: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(layers=[SlotLayer() for _ in range(layers)])
        self.dtype = dtype
        """What keys and values are kept in; None: as the model makes them."""
        self.slots = 0
        self.capacity = 0

    def begin(self, step: Step) -> None:
        """The next forward pass decodes one token for each of the step's rows."""
        for layer in self.layers:
            layer.step = step

    def reserve(self, like: Sequence[LayerKV] | None, slots: int, capacity: int, used: int) -> None:
        """Room for ``slots`` rows of ``capacity`` positions; the first ``used`` rows keep their content.

        ``like`` gives shapes before the first allocation. Copies layer by layer: the peak is one layer above the sum.
        """
        for i, layer in enumerate(self.layers):
            shapes = like[i] if layer.keys is None else (layer.keys[0], layer.values[0])
            layer.reserve(shapes, slots, capacity, used, self.dtype)
        self.slots, self.capacity = slots, capacity

    def write_prompt(self, rows: list[int], prompt: Sequence[LayerKV]) -> None:
        """Copy a prompt's keys and values to the slots of its samples, from position 0."""
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        where = slice(rows[0], rows[0] + len(rows)) if contiguous else rows
        for layer, (key_HND, value_HND) in zip(self.layers, prompt, strict=True):
            layer.keys[where, :, : key_HND.shape[1]] = key_HND.to(layer.keys.dtype)
            layer.values[where, :, : value_HND.shape[1]] = value_HND.to(layer.values.dtype)

    def move(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first ``length`` positions of slots ``source`` over slots ``target``."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]
