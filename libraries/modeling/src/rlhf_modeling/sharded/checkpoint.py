"""Saves and restores a trainer. Each rank writes and reads its part of the state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import CheckpointError, ConfigError
from torch import Tensor

from rlhf_modeling import state
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.sharded import checkpoint_files
from rlhf_modeling.sharded.process_group import barrier
from rlhf_modeling.sharded.weights import ShardedWeights

STEP = "step"
"""The optimizer's state that is one number per tensor."""


def save(trainer: ShardedWeights, division: Mapping[str, Any], path: Path) -> None:
    """Write ``rank-R-of-N.safetensors`` per rank and, when all of them exist, ``trainer.json``.

    Args:
        division: facts about how the model is divided, for people.
    """
    spec, partition = trainer.spec, trainer.partition
    path.mkdir(parents=True, exist_ok=True)
    kinds: dict[str, dict[int, Tensor]] = {
        checkpoint_files.WEIGHT: {i: flat.data for i, flat in enumerate(partition.flats)}
    }
    scalars: dict[str, dict[int, float]] = {}
    if trainer.average is not None:
        kinds[checkpoint_files.AVERAGE] = dict(enumerate(trainer.average.tensors))
    for index, flat in enumerate(partition.flats):
        for key, value in _optimizer_state(trainer, flat.owner).items():
            if key == STEP:
                scalars.setdefault(key, {})[index] = float(value)
            else:
                kinds.setdefault(checkpoint_files.OPTIMIZER + key, {})[index] = value.view(-1)
    pieces = checkpoint_files.local_pieces(partition, trainer.split)
    checkpoint_files.write(path, pieces, kinds, scalars, trainer.split, spec.rank, spec.world_size)
    barrier()
    if spec.rank == 0:
        facts = {"trainer": trainer.name, "ranks": spec.world_size, **division}
        state.write(path, {}, facts | _settings(trainer) | trainer.saved_facts())
    barrier()


def load(trainer: ShardedWeights, path: Path) -> None:
    """Restore what :func:`save` wrote. The number of ranks and the division may differ."""
    facts = state.read_facts(path)
    _check(trainer, facts, path)
    partition = trainer.partition
    shapes = {name: trainer.tensors.shapes[name] for name in trainer.parameters}
    saved = checkpoint_files.RankFiles(path, facts["ranks"], shapes, trainer.split)
    saved.check(checkpoint_files.WEIGHT)
    saved.restore(checkpoint_files.WEIGHT, partition.flats, [flat.data for flat in partition.flats])
    if trainer.average is not None:
        saved.check(checkpoint_files.AVERAGE)
        saved.restore(checkpoint_files.AVERAGE, partition.flats, trainer.average.tensors)
    if trainer.base is not None:
        _restore_optimizer(trainer, saved)
    partition.publish()
    trainer.restore_facts(facts)
    trainer.zero_grad()
    barrier()


def _settings(trainer: ShardedWeights) -> dict[str, Any]:
    """Facts that must be the same in the checkpoint and in the run that resumes from it. With adapters, a checkpoint
    holds only these; the frozen model is read from its own path."""
    return {
        "trained": trainer.spec.role.trained,
        "storage": trainer.spec.storage,
        "ema": trainer.average is not None,
        "optimizer": trainer.config.optimizer,
        "lora": trainer.saved_facts()["lora"],
    }


def _check(trainer: ShardedWeights, facts: dict[str, Any], path: Path) -> None:
    if not isinstance(facts.get("ranks"), int):
        raise CheckpointError(
            f"{str(path)!r} was not saved by trainer {trainer.name!r}: its {state.FACTS} has no number of ranks"
        )
    by = facts.get("trainer", "deepspeed")  # old checkpoints of trainer deepspeed have no name
    if by != trainer.name:
        raise CheckpointError(
            f"the checkpoint {str(path)!r} was saved by trainer {by!r}; this run has trainer {trainer.name!r}. Resume "
            f"with trainer.use = {by!r}, or start a new run from its exported model."
        )
    settings = _settings(trainer)
    saved = {key: facts.get(key) for key in settings} | {"storage": facts.get("storage", "fp32")}  # older: not named
    if saved["lora"] is not None:  # written by a version with fewer options
        saved["lora"] = {**LoraOptions(rank=1).model_dump(mode="json"), **saved["lora"]}
    if saved != settings:
        raise ConfigError(
            f"the checkpoint {str(path)!r} was saved with {saved}; this run has {settings}. Resume with its config."
        )


def _optimizer_state(trainer: ShardedWeights, owner: Tensor) -> dict[str, Tensor]:
    if trainer.base is None:
        return {}
    return {key: value for key, value in trainer.base.state.get(owner, {}).items() if isinstance(value, Tensor)}


def _restore_optimizer(trainer: ShardedWeights, saved: checkpoint_files.RankFiles) -> None:
    assert trainer.base is not None
    optimizer = trainer.base
    optimizer.state.clear()
    kinds = sorted(kind for kind in saved.kinds() if kind.startswith(checkpoint_files.OPTIMIZER))
    for flat in trainer.partition.flats:
        names = [piece.name for piece in flat.pieces]
        restored: dict[str, Any] = {}
        for kind in kinds:
            if not any(saved.has(kind, name) for name in names):
                continue  # never stepped, or stepped by the optimizer's other algorithm
            target = torch.zeros_like(flat.data)
            saved.restore(kind, [flat], [target])
            restored[kind.removeprefix(checkpoint_files.OPTIMIZER)] = target.view_as(flat.owner)
        for key, by_name in saved.scalars().items():
            values = [by_name[n] for n in names if n in by_name]
            if values:
                # The optimizer has one number per flat, but the parameters of a flat may come from several flats.
                restored[key] = torch.tensor(max(values), dtype=torch.float32, device=flat.owner.device)
        if restored:
            optimizer.state[flat.owner] = restored
