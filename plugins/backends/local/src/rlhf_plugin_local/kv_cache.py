"""The key-value cache of the generator: one slot per row, written in place at each row's own position.

The attention routes of :mod:`rlhf_plugin_local.sampling_attention` write and read it. transformers' ``Cache`` is not
used: a model with an attention function from ``AttentionInterface`` gets neither a cache argument nor a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LayerKV = tuple[Tensor, Tensor]
"""Keys and values of one prompt in one layer: [N, H, D] each (D may differ between keys and values)."""


class SlotCache:
    """Keys and values of each layer, [slots, H, capacity, D] each, in the dtype of the model.

    Grows in rows and positions as needed. Its size is always ``slots x capacity``.
    """

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.slots = 0
        self.capacity = 0

    def reserve(self, like: Sequence[LayerKV] | None, slots: int, capacity: int, used: int) -> None:
        """Allocate room for ``slots`` rows of ``capacity`` positions. The first ``used`` rows keep their content.

        ``like`` gives the shapes for the first allocation. Layers are copied one by one, so the peak is one layer above
        the sum.
        """
        if not self.keys:
            for side, tensors in enumerate((self.keys, self.values)):
                for layer in like or ():
                    tensors.append(layer[side].new_zeros(slots, layer[side].shape[1], capacity, layer[side].shape[2]))
        else:
            length = min(capacity, self.capacity)
            for tensors in (self.keys, self.values):
                for i, old in enumerate(tensors):
                    new = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                    new[:used, :, :length] = old[:used, :, :length]
                    tensors[i] = new
        self.slots, self.capacity = slots, capacity

    def write_prompt(self, rows: list[int], prompt: Sequence[LayerKV]) -> None:
        """Copy a prompt's keys and values to the slots of its samples, from position 0."""
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        slots = slice(rows[0], rows[0] + len(rows)) if contiguous else rows
        for i, layer in enumerate(prompt):
            for cache, new_NHD in ((self.keys[i], layer[0]), (self.values[i], layer[1])):
                cache[slots, :, : len(new_NHD)] = new_NHD.transpose(0, 1)

    def write(self, layer: int, index_SH: Tensor, key_SHD: Tensor, value_SHD: Tensor) -> None:
        """One token per row; ``index_SH`` is flat over (slot, head, position)."""
        for cache, new_SHD in ((self.keys[layer], key_SHD), (self.values[layer], value_SHD)):
            cache.view(-1, cache.shape[3]).index_copy_(0, index_SH, new_SHD.reshape(-1, cache.shape[3]).to(cache.dtype))

    def move(self, source: list[int], target: list[int]) -> None:
        """Copy slots ``source`` over slots ``target``. Whole slots are copied, as contiguous copies are far faster."""
        for tensors in (self.keys, self.values):
            for cache in tensors:
                slots_2S = torch.tensor([source, target], device=cache.device)
                cache.index_copy_(0, slots_2S[1], cache.index_select(0, slots_2S[0]))
