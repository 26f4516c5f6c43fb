"""LoRA: a frozen model with trained low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through peft.

The role trains the adapters, and also a fresh scalar or classes head and the modules of ``modules_to_save``.
Generators, exports and snapshots get one merged model under its usual names. With the adapters switched off, the module
computes the initial model, so a reference needs no second copy.

DoRA (Liu et al. 2024, arXiv:2402.09353) also trains the length m of every row of an adapted matrix. The layer uses m (W
+ s B A) / |W + s B A|; the norm of each row gets no gradient (section 4.3).

Shape suffixes: N tokens, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rlhf.errors import ConfigError, did_you_mean
from torch import Tensor, nn

from rlhf_modeling.config import LoraOptions
from rlhf_modeling.images.architecture import vision_prefixes

NAME = "default"
MODEL = "model"


def add_adapters(module: nn.Module, head: nn.Module, options: LoraOptions, seed: int) -> None:
    """Add an adapter to every target. A is drawn from ``seed`` and B is zero, so the model's outputs do not change.

    Raises ConfigError if peft is not installed, the model has no linear layer, or a target matches no layer.
    """
    try:
        import peft
    except ImportError:
        raise ConfigError("trainer.lora needs peft: pip install peft") from None
    layers = matching(
        [name for name, _ in adaptable(module, head, options.vision)], options.targets, type(module).__name__
    )
    container = nn.Module()  # without a config: with one, peft renames these targets for some mixtures of experts
    container.add_module(MODEL, module)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=alpha(options),
        lora_dropout=options.dropout,
        target_modules=[f"{MODEL}.{name}" for name in layers],
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, container, adapter_name=NAME)


def adaptable(module: nn.Module, head: nn.Module | None, vision: bool = False) -> list[tuple[str, nn.Linear]]:
    """(name, layer) of every linear layer except the head. Without ``vision``, layers of a vision tower and its
    projector are also excluded. Experts that are slices of one tensor do not count, nor do routers that subclass a
    linear layer and return choices."""
    prefixes = () if vision else vision_prefixes(module)
    linear = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear) and m is not head]
    linear = [(name, m) for name, m in linear if not prefixes or not name.startswith(prefixes)]
    return [(name, m) for name, m in linear if "Router" not in type(m).__name__]


def matching(linear: Sequence[str], targets: Sequence[str] | None, model: str) -> list[str]:
    """The names of linear layers that end with one of ``targets``; all names if it is None.

    Raises ConfigError if there is no linear layer, or a target matches none. ``model`` is for the message.
    """
    if not linear:
        raise ConfigError(f"trainer.lora: {model} has no linear layers, so it cannot have adapters")
    last_names = {name: name.rpartition(".")[2] for name in linear}
    if targets is None:
        return list(linear)
    if unknown := sorted(set(targets) - set(last_names.values())):
        names = sorted(set(last_names.values()))
        raise ConfigError(
            f"trainer.lora.targets: no linear layer is called {', '.join(unknown)}; allowed: {', '.join(names)}."
            + "".join(did_you_mean(name, names) for name in unknown)
        )
    return [name for name, last in last_names.items() if last in targets]


def saved_modules(
    module: nn.Module, names: Sequence[str], own_head: nn.Module | None, adapted: Sequence[str]
) -> list[str]:
    """The names of the modules that end with one of ``names`` (``trainer.lora.modules_to_save``).

    Args:
        own_head: the role's scalar or classes head, which is always trained; None: the head of a language model.
        adapted: names of the layers that get adapters.

    Raises ConfigError if a name matches no module with weights, or its module has an adapter.
    """
    prefixes = tuple(f"{name}." for name in adapted)
    last_names = {
        name: name.rpartition(".")[2]
        for name, m in module.named_modules()
        if name and m is not own_head and not name.startswith(prefixes) and any(True for _ in m.parameters())
    }
    if unknown := sorted(set(names) - set(last_names.values())):
        choices = sorted({last for last in last_names.values() if not last.isdecimal()})
        raise ConfigError(
            f"trainer.lora.modules_to_save: no module is called {', '.join(unknown)}; allowed: {', '.join(choices)}."
            + "".join(did_you_mean(name, choices) for name in unknown)
            + (" The role's own head is always trained." if own_head is not None else "")
        )
    saved = [name for name, last in last_names.items() if last in names]
    for name in saved:
        if clash := [layer for layer in adapted if f"{layer}.".startswith(f"{name}.")]:
            raise ConfigError(
                f"trainer.lora.modules_to_save: {name} would be fully trained, but {clash[0]} gets an adapter. Remove "
                "the name from this list, or set trainer.lora.targets to other layers."
            )
    return saved


def linear(layer: Any, x_NI: Tensor) -> Tensor:
    """[N, outputs] of a linear layer, with its adapter if it has one. One matrix product adds s B A x to W x + b in
    place (rounded once in bf16). The weights must be whole. A layer of DoRA is computed by peft.

    peft's own forward allocates three more tensors as large as the output. On a CPU they fragment the heap, because the
    adapter's small inner output is allocated between them and kept for the backward pass.
    """
    if type(layer) is nn.Linear or not hasattr(layer, "lora_A") or layer.merged or "forward" in vars(layer):
        return layer(x_NI)  # a custom forward changes inputs or outputs
    if layer.lora_variant:
        return layer(x_NI)
    return with_adapter(layer, x_NI)


def with_adapter(layer: Any, x_NI: Tensor) -> Tensor:
    """[N, outputs] of a layer with its adapter. Inside :func:`without_adapters`, the output of the layer alone."""
    y_NO: Tensor = layer.base_layer(x_NI)
    if layer.disable_adapters:
        return y_NO
    z_NR = layer.lora_A[NAME](layer.lora_dropout[NAME](x_NI))
    # Autocast leaves in-place operations alone, so the factor is converted here.
    return y_NO.addmm_(z_NR, layer.lora_B[NAME].weight.t().to(y_NO.dtype), alpha=layer.scaling[NAME])


def train_adapters_only(module: nn.Module, head: nn.Module | None, saved: Sequence[str] | None = None) -> None:
    """Train only the adapters, ``head`` if it is a scalar or classes head of the role, and the modules of ``saved``
    (:func:`saved_modules`). They are trained in place; a trainer keeps their initial values for the view ``base``."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if head is not None:
        head.requires_grad_(True)
    for name in saved_modules(module, saved, head, [n for n, _ in adapted(module)]) if saved else ():
        module.get_submodule(name).requires_grad_(True)


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name or ".lora_magnitude_vector." in name


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Context in which the module computes with its base weights."""
    layers = [layer for _, layer in adapted(module)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapted(module: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of every layer that has an adapter."""
    return [(name, m) for name, m in module.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]


def merged_name(name: str) -> str:
    """The Hugging Face name of a base tensor of a module with adapters."""
    return re.sub(r"\.base_layer\.", ".", name)


def base_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) of the model without its adapters."""
    return ((merged_name(n), dequantised(module, n, t).detach()) for n, t in tensors.items() if not is_adapter(n))


@torch.no_grad()
def merged(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight with its adapter added) of ``tensors``, which have the module's names. A tensor
    without an adapter shares memory with the module. Quantised weights are dequantised one at a time."""
    layers = dict(adapted(module))
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        owner, tensor = name.removesuffix(".base_layer.weight"), dequantised(module, name, tensor)
        if owner != name:
            layer = layers[owner]
            a_RI, b_OR = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            tensor = with_product(tensor, layer, a_RI, b_OR, length_of(layer))
        yield merged_name(name), tensor.detach()


def dequantised(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or the values of a quantised layer, whose weight has no values in a state dict."""
    if not tensor.is_meta:
        return tensor
    layer: Any = module.get_submodule(name.rpartition(".")[0])
    values: Tensor = layer.weight
    return values


def alpha(lora: LoraOptions) -> int:
    return lora.alpha if lora.alpha is not None else 2 * lora.rank


def scaling(lora: LoraOptions) -> float:
    """s of a layer's W + s B A, as peft computes it."""
    return alpha(lora) / (math.sqrt(lora.rank) if lora.use_rslora else lora.rank)


def length_of(layer: Any) -> Tensor | None:
    """[O]: DoRA's lengths of the rows of ``layer``; None without DoRA."""
    lengths: Tensor | None = layer.lora_magnitude_vector[NAME].weight if NAME in layer.lora_magnitude_vector else None
    return lengths


def with_product(weight_OI: Tensor, layer: Any, a_RI: Tensor, b_OR: Tensor, length_O: Tensor | None = None) -> Tensor:
    """[O, I]: the weight of ``layer`` with its adapter added. The factors (and lengths) must be whole. Computed in fp32
    and rounded once to the weight's number format."""
    scaling: float = layer.scaling[NAME]
    sum_OI = weight_OI.float() + b_OR.float() @ a_RI.float() * scaling
    if length_O is not None:
        sum_OI = sum_OI * (length_O.float() / torch.linalg.vector_norm(sum_OI, dim=1))[:, None]
    return sum_OI.to(weight_OI.dtype)
