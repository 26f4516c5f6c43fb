"""Compare the log-probs that a generator reports for its samples with the trainer's forward pass over them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from parts import Part
from recorded import VOCABULARY, Recorded
from rlhf.interfaces import Generator, GeneratorSpec, ModelSpec
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import GenerationRequest, RoleSpec, Sampling, Turn
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.data.tokenizer import TokenDecoder
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync

TEMPERATURES = (1.0, 0.7)
MEAN = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest mean difference of a sampled token's log-prob: the default of ``sync.tolerance``, for the same reasons."""


def policy(model: Any, device: str, dtype: str) -> Role:
    """A trained role whose model lives in this process."""
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model), dtype)
    group = LocalLauncher(None).launch_trainer(TorchTrainer, TorchTrainerConfig(device=device), spec)
    return Role(spec, group, 4096)


def generator_spec(model: Any, dtype: str, max_tokens: int = 512) -> GeneratorSpec:
    return GeneratorSpec((1,), TokenDecoder(str(model), False), str(model), dtype, max_tokens=max_tokens)


def requests(count: int, longest: int, new: int, temperature: float) -> list[GenerationRequest]:
    """Prompts of several lengths, two samples each."""
    draw = random.Random(1)
    prompts = [tuple(draw.randrange(3, VOCABULARY) for _ in range(draw.randrange(2, longest))) for _ in range(count)]
    sampling = Sampling(new, temperature, ignore_eos=True)
    return [GenerationRequest(ids, 1000 + n, sampling) for ids in prompts for n in range(2)]


def draw_all(generator: Generator, queries: Sequence[GenerationRequest]) -> list[Turn]:
    """In the order of the requests."""
    turns = dict(generator.generate(queries))
    return [turns[n] for n in range(len(queries))]


def apart(role: Role, queries: Sequence[GenerationRequest], turns: Sequence[Turn]) -> torch.Tensor:
    """[sampled tokens]: |log-prob of the generator - the trainer's|."""
    units, logprobs = [], []
    for request, turn in zip(queries, turns, strict=True):
        mask = [False] * len(request.ids) + [True] * len(turn.ids)
        columns = {"loss_mask": mask, "temperature": [turn.temperature if flag else 0.0 for flag in mask]}
        units.append(UnitData([SequenceData([*request.ids, *turn.ids], columns)]))
        logprobs += turn.logprobs
    batch = pack(units)
    ours_N = role.forward(batch, [resolve_head("logprobs", None)])["logprobs"]
    return (ours_N[batch.tok["loss_mask"]] - torch.tensor(logprobs)).abs()


def compare(part: Part, label: str, dtype: str, role: Role, generator: Generator, small: bool) -> None:
    for temperature in TEMPERATURES:
        queries = requests(*((3, 12, 8) if small else (16, 128, 64)), temperature)
        difference = apart(role, queries, draw_all(generator, queries))
        name = f"{label}, temperature {temperature:g}"
        part.figures[name] = {
            "tokens": len(difference),
            "mean": float(difference.mean()),
            "most": float(difference.max()),
        }
        part.at_most(f"{name}: log-probs apart from the trainer's, mean", float(difference.mean()), MEAN[dtype])


def check_transformers(recorded: Recorded, device: str, part: Part) -> None:
    for dtype in ("fp32", "bf16"):
        role = policy(recorded.model, device, dtype)
        generator = TransformersGenerator(None, generator_spec(recorded.model, dtype))
        generator.load(role.group.worker, 0)
        compare(part, dtype, dtype, role, generator, recorded.small)


@contextmanager
def engine(model: Any, dtype: str, **options: Any) -> Iterator[Generator]:
    """A vLLM engine in this process, closed at the end; not compiled, which takes most of a minute."""
    from rlhf_plugin_vllm.generator import VllmGenerator

    config = VllmGenerator.Config(**{"eager": True, "max_sequences": 64, **options})
    spec = replace(generator_spec(model, dtype), shares_devices=True)  # the policy is in this process
    generator = VllmGenerator(config, spec)
    try:
        yield generator
    finally:
        generator.close()


def check_vllm(recorded: Recorded, device: str, dtype: str, part: Part, **options: Any) -> None:
    """The engine gets its weights by a sync, as in a run, canaries included."""
    role = policy(recorded.model, device, dtype)
    with engine(recorded.model, dtype, kv_cache_gib=0.25, **options) as generator:
        part.figures["sync"] = WeightSync(role, generator, SyncSection(), 0, print).push(1)
        compare(part, dtype, dtype, role, generator, recorded.small)
