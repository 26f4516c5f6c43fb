"""The sequences on which a loaded model is compared with another way of computing it, and the criterion of the
comparison."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.seeds import derive_seed
from torch import Tensor, nn

from rlhf_modeling.loaded import LoadedModel

TOLERANCE = 1e-3
"""A token's hidden state is wrong if it differs by more than this share of its norm. A different order of summation
gives 1e-6 to 1e-5; a leak from another sequence gives 1e-2 and more."""
MOST_OFF = 1 / 8
"""A larger share of wrong tokens is an error. Rounding may send a single token to another expert."""
SHORT = 4
"""Windows, chunks and thresholds of attention while the model is probed; the sequences are longer."""
LENGTHS_OF_CONFIGS = (
    "sliding_window", "attention_chunk_size", "attention_window_size", "local_attn_window", "index_topk",
    "index_topk_blocks", "floor_scale", "log_scaling_n_floor",
)  # fmt: skip
"""Names of windows, chunks and thresholds in configs and modules."""
FRONT = 6
"""Length of the prefix that some of the probe's sequences share."""
LENGTHS = (9, 14, 3, 14, 12)


def probe_rows(model: LoadedModel) -> list[Tensor]:
    """Sequences of the probe: int64, on the model's device, without ids that the config uses as special tokens."""
    config = model.module.config
    fields = {**config.to_dict(), **config.get_text_config().to_dict()}
    special = {value for name, value in fields.items() if name.endswith("token_id") and isinstance(value, int)}
    plain = [i for i in range(min(model.vocabulary, 1000)) if i not in special] or [0]
    generator = torch.Generator().manual_seed(derive_seed(0, "probe"))
    device = next(model.module.parameters()).device

    def draw(count: int) -> Tensor:
        return torch.tensor(plain)[torch.randint(len(plain), (count,), generator=generator)]

    front = draw(FRONT)
    shared = (1, 3, 4)
    rows = [torch.cat([front, draw(n - FRONT)]) if i in shared else draw(n) for i, n in enumerate(LENGTHS)]
    return [ids[: model.positions].to(device) for ids in rows]


@contextmanager
def short_lengths(module: nn.Module) -> Iterator[None]:
    """Context in which every window and chunk of attention, in configs and modules, has :data:`SHORT` tokens."""
    from transformers import PreTrainedModel

    holders: dict[int, Any] = {id(part): part for part in module.modules()}
    for part in [part for part in holders.values() if isinstance(part, PreTrainedModel)]:
        for config in (part.config, part.config.get_text_config()):
            holders[id(config)] = config
    attributes = []
    for holder in holders.values():
        for name in LENGTHS_OF_CONFIGS:
            value = vars(holder).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > SHORT:
                attributes.append((holder, name, value))
                setattr(holder, name, SHORT)
    try:
        yield
    finally:
        for holder, name, value in attributes:
            setattr(holder, name, value)


def wrong(got_NH: Tensor, want_NH: Tensor) -> bool:
    """Whether more tokens have different hidden states than rounding explains."""
    return share_off(got_NH, want_NH) > MOST_OFF


def share_off(got_NH: Tensor, want_NH: Tensor) -> float:
    """The share of tokens whose hidden states are wrong (:data:`TOLERANCE`)."""
    close_N = (got_NH.float() - want_NH).norm(dim=-1) <= TOLERANCE * want_NH.norm(dim=-1)  # False for NaN
    return 1.0 - float(close_N.float().mean())
