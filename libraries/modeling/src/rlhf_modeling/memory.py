"""Memory of one rank that trains or holds a transformers model, for ``rlhf plan``.

A trainer describes how it stores the model (:class:`Storage`); :func:`trainer_memory` adds the memory of the
computation. The sums should be within 25 % of the memory of a process (docs/how-to/plan.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import FP32, ModelSize, PhaseMemory, TrainerMemory, TrainerWork

from rlhf_modeling import activations as pass_
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.arithmetic import frozen_parameters, saved_parameters
from rlhf_modeling.config import LoraOptions, TrainingConfig
from rlhf_modeling.images.memory import patches, recomputed_tower, tower_activations, tower_working
from rlhf_modeling.quantized import BYTES, Format
from rlhf_modeling.storage import Storage

FREED = {"cpu": 0.15, "cuda": 0.10}
"""Allowance for freed memory that an allocator keeps, as a share of temporary memory."""


def adapter_parameters(size: ModelSize, lora: LoraOptions) -> tuple[int, int]:
    """Parameters of the adapters' matrices, and of DoRA's lengths."""
    rows = sum(o for name, _, o, _ in size.linear if lora.targets is None or name in lora.targets)
    return size.adapter_parameters(lora.rank, lora.targets), rows if lora.use_dora else 0


def saving_of(size: ModelSize, kind: Format | None, stored: float, excluded_layers: Collection[str] = ()) -> float:
    """Bytes that quantised layers save compared with weights of ``stored`` bytes. Layers with the same name count as
    equal.

    Args:
        excluded_layers: names of layers that are not quantised.
    """
    if kind is None:
        return 0.0
    weights = sum(i * o // count for name, i, o, count in size.linear if name not in excluded_layers)
    return weights * (stored - BYTES[kind])


# --------------------------------------------------------------------------------------------- sums


def trainer_memory(
    storage: Storage, a: Arithmetic, config: TrainingConfig, spec: ModelSpec, size: ModelSize, work: TrainerWork
) -> TrainerMemory:
    """The memory of one rank of a role in every phase, with the options of its trainer."""
    s, part = storage, part_of(size, storage.layer_ranks)
    trained, lora = spec.role.trained, config.lora
    count = matrices = 0
    parameters, quantized = part.parameters, saving_of(part, config.quantization, s.weight_bytes)
    if trained and lora is not None:
        matrices, lengths = adapter_parameters(part, lora)
        saved = saved_parameters(config, spec)
        count = matrices + lengths + saved + (0 if part.outputs == part.vocabulary else part.head)
        # The initial values of saved modules are kept.
        parameters += matrices + lengths + (count if saved else 0)
        quantized = saving_of(part, lora.quantization, s.weight_bytes, lora.modules_to_save or ())
    elif trained:
        count, matrices = part.parameters - frozen_parameters(config, size), part.matrices
    # Bytes that exist in every phase.
    copies = 1 / s.weight_ranks + (1 / s.second_ranks if s.second_ranks else 0)
    weights = int((parameters * s.weight_bytes - quantized) * copies)
    optimizer = int((count * s.optimizer_bytes - matrices * s.matrix_saving) / s.optimizer_ranks)
    gradients = int(count * s.gradient_bytes / s.gradient_ranks)
    gradient_bytes = gradients if s.keeps_gradients else 0
    state = {"weights": weights, "optimizer": optimizer, "gradients": gradient_bytes}
    on_host = {"weights"} if s.host_weights else set()
    moved = {"optimizer", "gradients"}
    on_cpu = a.device == "cpu"
    buffers, pixels = s.buffers + (a.pixels if on_cpu else 0), 0 if on_cpu else a.pixels
    rest = _split(state, on_host | moved if s.host_optimizer else on_host, buffers, pixels)
    freed = gradients - gradient_bytes if on_cpu else 0  # freed, but the process keeps the pages
    if freed:
        rest = replace(rest, device={**rest.device, "allocator": freed})
    offloaded = _split(state, on_host | moved if s.host_optimizer or s.offloads else on_host, buffers, pixels)
    # The phases.
    forward = _fullest(_forward(s, a, part, work.annotated or work.outputs), a.device)
    phases = {
        "load": PhaseMemory(_load(s, a, part, size, count, quantized)),
        "rest": rest,
        "offloaded": offloaded,
        "forward": PhaseMemory(_sum(rest.device, forward), rest.host),
    }
    if trained:
        host_gradients = gradients if s.host_optimizer and not s.keeps_gradients else 0
        on_device = 0 if s.host_optimizer else gradients
        pieces = max(0, freed - (0 if a.adapters else part.head * FP32))
        added = _fullest(_train(s, a, part, on_device, work.outputs), a.device, pieces)
        base = {name: size for name, size in rest.device.items() if name not in ("gradients", "allocator")}
        phases["train"] = PhaseMemory(_sum(base, added), rest.host + host_gradients + _host_inputs(part, a))
    return TrainerMemory(
        phases,
        a.tokens * a.parts,
        count,
        a.bf16,
        ("live", "base") if trained and a.adapters else ("live",),
        copies=s.weight_ranks > 1 or s.layer_ranks > 1 or s.host_weights,
        arithmetic=_explained(s, a, part, parameters, count, quantized),
    )


def part_of(size: ModelSize, ranks: int) -> ModelSize:
    """The part of each of ``ranks`` that divide every layer: some heads, some of the feed-forward width. The norms of a
    layer, a ten-thousandth of it, count as divided too."""
    if ranks == 1:
        return size
    names = ("parameters", "query", "key", "value", "heads", "ffn", "largest")
    layers = tuple(replace(x, **{name: -(-getattr(x, name) // ranks) for name in names}) for x in size.layers)
    absent_parameters = sum(x.parameters for x in size.layers) - sum(x.parameters for x in layers)
    return replace(size, layers=layers, parameters=size.parameters - absent_parameters, matrices=size.matrices // ranks)


def _split(state: Mapping[str, int], on_host: set[str], buffers: int, host: int) -> PhaseMemory:
    """
    Args:
        buffers: bytes on the device beside ``state``.
        host: bytes in host memory beside ``state``.
    """
    device = {part: size for part, size in state.items() if size and part not in on_host}
    if buffers:
        device["working"] = buffers
    return PhaseMemory(device, host + sum(size for part, size in state.items() if part in on_host))


def _load(s: Storage, a: Arithmetic, part: ModelSize, size: ModelSize, count: int, quantized: float) -> dict[str, int]:
    """The weights that one rank holds temporarily, and the memory for creating its buffers. Ranks that divide layers
    first read whole layers in host memory, and with ``whole_at_load`` the whole model. Layers are quantised one by one,
    on their way to the device."""
    source = size if a.device == "cpu" else part
    making = int(count * s.making_bytes) + (s.buffers if s.making_bytes else 0)
    if part.outputs == part.vocabulary:  # a language model computes once, to check its head
        making += s.gathered
    ranks = 1 if s.whole_at_load and a.device == "cpu" else s.weight_ranks
    spared = 0.0 if a.device == "cpu" else quantized
    return {"weights": int((source.parameters * max(s.weight_bytes, s.read_bytes) - spared) / ranks), "working": making}


def _forward(s: Storage, a: Arithmetic, part: ModelSize, outputs: tuple[str, ...]) -> Iterator[dict[str, int]]:
    shared = s.gathered + pass_.casts(part, a)
    yield {"working": shared + tower_working(part, a)}
    yield {"working": shared + pass_.widest_working(part, a)}
    yield {"working": shared, "logits": pass_.head_working(part, a, outputs, backward=False)}


def _train(
    s: Storage, a: Arithmetic, part: ModelSize, gradients: int, outputs: tuple[str, ...]
) -> Iterator[dict[str, int]]:
    """The backward passes of a step with one micro-batch and of a step with several, and the optimizer's step."""
    if not s.frees_gradients:
        yield from _backward(s, a, part, gradients, gradients, outputs)
    else:
        yield from _backward(s, a, part, 0, gradients, outputs)
        tokens = a.tokens if a.accumulated_tokens is None else a.accumulated_tokens
        if tokens:
            yield from _backward(s, replace(a, tokens=tokens), part, gradients, gradients, outputs)
    yield {"gradients": gradients, "working": s.step}


def _backward(
    s: Storage, a: Arithmetic, part: ModelSize, old_gradients: int, gradients: int, outputs: tuple[str, ...]
) -> Iterator[dict[str, int]]:
    """The backward passes of the head, of the last layer, of the first layer, of the embedding, and of the vision
    tower.

    Args:
        old_gradients: bytes of gradients that exist before the pass.
        gradients: bytes of gradients after the pass.
    """
    tower, casts = tower_activations(part, a), pass_.casts(part, a)
    activations = pass_.activations(part, a) + tower
    common = {"gradients": old_gradients, "activations": activations}
    # with gradient checkpointing the casts of the forward pass are freed at its end
    kept_casts = 0 if a.checkpointing else casts
    yield common | {
        "logits": pass_.head_working(part, a, outputs, backward=True),
        "working": s.gathered + (kept_casts or casts),
    }
    tied = part.head * FP32 if part.tied and part.outputs == part.vocabulary and not a.adapters else 0
    head = tied if old_gradients or a.adapters else part.head * FP32
    working = s.gathered + kept_casts + pass_.widest_working(part, a) + pass_.weight_gradient(part, a)
    yield common | {"activations": activations + pass_.recomputed(part, a), "logits": head, "working": working}
    common = {"gradients": gradients, "logits": tied if old_gradients else 0}
    yield common | {"activations": tower + pass_.largest_layer(part, a), "working": working}
    # the gradient of the lookup is a whole matrix; the gradient of a tied head is added in new memory
    embedding = 0 if a.adapters else part.embedding * FP32 * (2 if tied else bool(old_gradients))
    yield common | {"activations": tower, "working": s.gathered + kept_casts + embedding}
    if part.tower is not None:
        working = s.gathered + kept_casts + tower_working(part, a)
        yield {"gradients": gradients, "activations": tower + recomputed_tower(part, a), "working": working}


def _host_inputs(part: ModelSize, a: Arithmetic) -> int:
    """Bytes of the layers' inputs in host memory. torch allocates pinned memory in powers of two."""
    if not a.offloads:
        return 0
    inputs = [(len(part.layers), a.tokens * part.hidden)]
    if part.tower is not None and a.trains_vision:
        inputs.append((part.tower.layers, patches(part.tower, a) * part.tower.hidden))
    return sum(layers << (elements * FP32 - 1).bit_length() for layers, elements in inputs)


def _fullest(moments: Iterator[dict[str, int]], device: str, freed: int = 0) -> dict[str, int]:
    """
    Args:
        freed: bytes of gradients of the previous step, whose pages the process keeps. New gradients and activations
            reuse them; logits are too large.
    """

    def with_allowance(parts: dict[str, int]) -> dict[str, int]:
        free = max(0, freed - parts.get("gradients", 0))
        allowance = FREED[device] * (sum(parts.values()) + free) + max(0, free - parts.get("activations", 0))
        return {part: size for part, size in parts.items() if size} | {"allocator": int(allowance)}

    return max(map(with_allowance, moments), key=lambda parts: sum(parts.values()))


def _sum(parts: Mapping[str, int], additions: Mapping[str, int]) -> dict[str, int]:
    return {name: parts.get(name, 0) + additions.get(name, 0) for name in dict.fromkeys([*parts, *additions])}


# ------------------------------------------------------------------------------------------ messages


def _explained(
    s: Storage, a: Arithmetic, part: ModelSize, parameters: int, trained: int, quantized: float
) -> dict[str, str]:
    saving = f", less {quantized / 1e6:.4g} MB that quantised layers save" if quantized else ""
    second = f", plus a second copy over {s.second_ranks} ranks" if s.second_ranks else ""
    layers = f"{a.tokens} computed tokens x {len(part.layers)} layers"
    if part.tower is not None and a.trains_vision:
        layers += f", {patches(part.tower, a)} patches of images x {part.tower.layers} layers"
    return {
        "weights": product(parameters, s.weight_bytes, s.weight_ranks, s.layer_ranks) + second + saving,
        "gradients": product(trained, s.gradient_bytes, s.gradient_ranks, s.layer_ranks),
        "optimizer": product(trained, s.optimizer_bytes, s.optimizer_ranks, s.layer_ranks),
        "activations": layers
        + (", only their inputs, and one whole layer" if a.checkpointing else "")
        + (", all but two inputs in host memory" if a.offloads else ""),
        "logits": f"chunks of at most {a.logits} logits x 4 bytes, several copies",
        "allocator": f"{FREED[a.device]:.0%} of temporary memory"
        + (", and gradients that were freed" if a.device == "cpu" else ""),
    }


def product(count: int, size: float, ranks: int = 1, layer_ranks: int = 1, over: str = "ranks") -> str:
    """``70.6 G parameters x 12 bytes / 16 ranks``."""
    many = f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.4g} M"
    part = f" of layers in {layer_ranks} parts" if layer_ranks > 1 else ""
    return f"{many} parameters{part} x {size:g} bytes" + (f" / {ranks} {over}" if ranks > 1 else "")
