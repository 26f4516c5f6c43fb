"""A trainer of the policy in this process, and batches of random tokens for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import PluginVersionMismatch
from rlhf.interfaces import Loss, ModelSpec, Trainer
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec

SPECIAL = 3
"""Ids below are those of the tokenizer's special tokens."""


def trainer_class(name: str) -> type[Trainer]:
    """The class of a trainer. ``fsdp`` is measured on one rank with a torch that is older than it requires, too: it
    only lacks the switch for graphs that differ between ranks."""
    try:
        chosen: type[Trainer] = Plugins.discover().resolve("trainer", name).cls
    except PluginVersionMismatch:
        if name != "fsdp":
            raise
        from rlhf_plugin_fsdp.trainer import FsdpTrainer
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch < 2.13
            FSDPModule.set_reduce_scatter_unused_params = lambda *_, **__: None
        chosen = FsdpTrainer
    return chosen


def policy_spec(model: Path, **settings: Any) -> ModelSpec:
    """``settings``: other fields of the spec. The arithmetic is bf16 if they do not say otherwise."""
    return ModelSpec(RoleSpec("policy", trained=True), str(model), **{"dtype": "bf16", **settings})


def nll() -> Loss:
    loss: Loss = Plugins.discover().resolve("loss", "nll").cls()
    return loss


def rows(lengths: Sequence[int], vocabulary: int, loss: Loss) -> Batch:
    """Random tokens, packed; every token but the first of a row is learnt from."""
    draw = torch.Generator().manual_seed(0)
    ids = [torch.randint(SPECIAL, vocabulary, (n,), generator=draw).tolist() for n in lengths]
    units = [UnitData([SequenceData(row, {"loss_mask": [n > 0 for n in range(len(row))]})]) for row in ids]
    return weigh(pack(units), loss.reduce())
