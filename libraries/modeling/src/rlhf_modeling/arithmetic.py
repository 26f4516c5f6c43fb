"""The arithmetic of a trainer, from its options: tokens of a micro-batch, precision, trained weights."""

from __future__ import annotations

import math

import torch
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import ModelSize, TrainerWork

from rlhf_modeling.activations import Arithmetic, copies
from rlhf_modeling.adapters import matching, saved_modules
from rlhf_modeling.config import LoraOptions, TrainingConfig, most_logits, rounds_factors
from rlhf_modeling.images.memory import image_tokens, kept_pixels
from rlhf_modeling.precision import choose_precision
from rlhf_modeling.skeleton import known_skeleton


def arithmetic(
    config: TrainingConfig,
    spec: ModelSpec,
    size: ModelSize,
    work: TrainerWork,
    device: str,
    sharers: int = 1,
    parts: int = 1,
) -> Arithmetic:
    """How the trainer computes, from its options.

    Args:
        sharers: ranks that compute the same micro-batches, each a part of every layer (tensor parallel).
        parts: ranks that divide the tokens of a micro-batch among them (sequence parallel).
    """
    stored = spec.storage == "bf16"
    bf16 = stored or computes_bf16(spec.dtype, device)
    sums = bf16 and rounds_factors(config.head_fp32, device)
    budget = work.micro_tokens or parts * default_micro_tokens(spec, bf16, device)
    shares = math.ceil(work.units / max(1, spec.world_size // (sharers * parts)))
    shared = config.shared_prefixes and config.neftune_alpha is None
    limit, of_step = max(budget, work.unit), step_tokens(work, shares, shared)
    tokens = min(limit, of_step)
    own_tokens = math.ceil(tokens / parts)
    lora = adapters_of(config, spec, size)
    return Arithmetic(
        tokens=own_tokens,
        accumulated_tokens=math.ceil(several_tokens(work, limit, of_step, shared) / parts),
        longest=work.longest,
        repeats=repeats(work, tokens) if shared else 1.0,
        device=device,
        bf16=bf16,
        casts=bf16 and not stored,
        head_copies=(4 if stored and config.head_fp32 else 0) + (2 if sums else 0),
        rounded_head=sums,
        fused=config.kernels != "none",
        logits=_logits(config, device, work.outputs, backward=True),
        forward_logits=_logits(config, device, work.annotated or work.outputs, backward=False),
        checkpointing=spec.gradient_checkpointing and spec.role.trained,
        offloads=config.offload_activations and spec.role.trained and device != "cpu",
        adapters=0 if lora is None else lora.rank,
        parts=parts,
        image_tokens=image_tokens(size.tower, work.images, work.longest, own_tokens),
        trains_vision=spec.role.trained and not config.freeze_vision and (lora is None or lora.vision),
        pixels=kept_pixels(size.tower, work, spec.world_size),
    )


def _logits(config: TrainingConfig, device: str, outputs: tuple[str, ...], *, backward: bool) -> int:
    return most_logits(config, device, copies(outputs, backward=backward, device=device), backward=backward)


def adapters_of(config: TrainingConfig, spec: ModelSpec, size: ModelSize) -> LoraOptions | None:
    """The adapters of a trained role. Raises ConfigError if the model has no layer for them."""
    if not spec.role.trained or config.lora is None:
        return None
    matching([name for name, *_ in size.linear], config.lora.targets, size.architecture)
    return config.lora


def saved_parameters(config: TrainingConfig, spec: ModelSpec) -> int:
    """Number of parameters of the modules that are fully trained alongside adapters. 0 if transformers cannot build the
    model from its config alone."""
    names = config.lora.modules_to_save if config.lora is not None and spec.role.trained else None
    if not names:
        return 0
    if (module := known_skeleton(spec.path, spec.trust_remote_code, spec.images)) is None:
        return 0
    parameters = {
        id(p): p for n in saved_modules(module, names, None, ()) for p in module.get_submodule(n).parameters()
    }
    return sum(p.numel() for p in parameters.values())


def frozen_parameters(config: TrainingConfig, size: ModelSize) -> int:
    """Parameters that ``freeze_vision`` leaves untrained."""
    return size.vision if config.freeze_vision else 0


def default_micro_tokens(spec: ModelSpec, bf16: bool, device: str) -> int:
    """Default number of tokens of a micro-batch. On a CPU, larger matrices speed up bf16, but in fp32 they only cost
    memory. A GPU takes as long for a few tokens as for some thousands, because the operations of a small micro-batch
    end before the next ones are launched (benchmarks/gpu/README.md and benchmarks/measurements.md)."""
    if device != "cpu":
        return 16384 if spec.gradient_checkpointing else 8192
    return 4096 if bf16 else 2048


def computes_bf16(dtype: str, device: str) -> bool:
    """Whether ``dtype`` (``auto`` | ``fp32`` | ``bf16``) means bf16. A GPU has it; a CPU is measured."""
    if dtype != "auto":
        return dtype == "bf16"
    if device == "cuda":
        return True
    return choose_precision("auto", torch.device("cpu")).bf16


def step_tokens(work: TrainerWork, shares: int, shared: bool) -> int:
    """The maximum number of tokens that a rank computes in a step.

    Args:
        shares: number of units of the rank.
        shared: a prefix that sequences share is computed once.
    """
    if work.step is not None and (shared or work.siblings < 2) and shares >= work.units:  # one rank has all units
        return work.step
    if not shared or work.siblings < 2:
        return work.unit * shares
    sequences = math.ceil(work.unit / work.longest)
    groups = min(sequences * shares, math.ceil(sequences * work.units / work.siblings))
    return groups * work.prompt + (work.unit - sequences * work.prompt) * shares


def several_tokens(work: TrainerWork, limit: int, of_step: int, shared: bool) -> int:
    """The maximum number of tokens of a micro-batch if a step has several; 0 if ``limit`` tokens hold every step. Units
    that share a prefix stay together, and each goes to the emptiest micro-batch. So the fullest micro-batch has at most
    an equal share and one such group."""
    if of_step <= limit:
        return 0
    group_tokens = work.unit
    if shared and work.siblings > 1:
        sequences = math.ceil(work.unit / work.longest)
        group_tokens = work.prompt + (work.unit - sequences * work.prompt) * math.ceil(work.siblings / sequences)
    return min(limit, math.ceil(of_step / math.ceil(of_step / limit)) + group_tokens)


def repeats(work: TrainerWork, tokens: int) -> float:
    """Number of tokens of all sequences per computed token in a full micro-batch: n sequences of p + a tokens need p +
    n a."""
    if work.siblings < 2:
        return 1.0
    answer = work.longest - work.prompt
    count = min(max(1, (tokens - work.prompt) // answer), work.siblings)
    return count * work.longest / (work.prompt + count * answer)
