"""Selects the kernels for the element-wise operations of a model's layers: ``trainer.kernels``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rlhf.errors import CapabilityError
from torch import Tensor, nn

from rlhf_modeling import liger
from rlhf_modeling.config import Kernels
from rlhf_modeling.fused import LAYERS, fuse_layers, known_layers, restore_layers
from rlhf_modeling.loaded import LoadedModel
from rlhf_modeling.stored import in_bf16, in_fp32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

AGREE, AGREE_IN_BF16 = 1e-3, 2e-2
"""Largest relative norm of the difference between hidden states of Liger's and of transformers' layers. In bf16 two
implementations of 30 layers on a CPU differ by 5e-3."""


def check_kernels(kernels: Kernels, device: str) -> None:
    """Raises CapabilityError if ``trainer.kernels`` names kernels that a process with this ``device`` (``cpu`` |
    ``cuda``) does not have. Loading the model checks whether they support its layers."""
    problem = liger.why_not(device) if kernels == "liger" else ""
    if problem:
        raise CapabilityError(f"trainer.kernels = 'liger' is not available: {problem}. Remove the option.")


def use_kernels(model: LoadedModel, kernels: Kernels, bf16: bool = False) -> None:
    """Use the chosen kernels in the layers of a whole model if they compute the same as transformers' own code.

    Args:
        bf16: the model will be computed in bf16.

    Raises CapabilityError if kernels that were chosen by name compute something else or do not support the layers.
    """
    if kernels == "liger":
        check_liger(model, liger.use_liger(model.module), bf16)
    elif kernels == "own" and not _fuse(model):
        raise _not_fused(model.module)
    elif kernels == "auto" and not (bf16 and _takes_liger(model)):
        _fuse(model)


def require_own(module: PreTrainedModel) -> None:
    """Raises CapabilityError if not all layers can be fused. The module may be on the meta device."""
    if len(known_layers(module)) < module.config.get_text_config().num_hidden_layers:
        raise _not_fused(module)


def _not_fused(module: PreTrainedModel) -> CapabilityError:
    kinds = ", ".join(sorted(name.removesuffix("DecoderLayer") for name in LAYERS))
    return CapabilityError(
        f"trainer.kernels = 'own': not all layers of {type(module).__name__} can be fused (supported: layers of "
        f"{kinds}, with SiLU and without dropout in attention). Remove the option."
    )


def _takes_liger(model: LoadedModel) -> bool:
    """Use Liger's kernels if they are available, know the layers and compute the same."""
    config = model.module.config
    if liger.why_not(_device(model).type) or in_bf16(model.module) or config.get_text_config() is not config:
        return False
    try:
        check_liger(model, liger.use_liger(model.module), bf16=True)
    except CapabilityError:
        return False
    return True


def check_liger(model: LoadedModel, modules: list[nn.Module], bf16: bool) -> None:
    """Compare a model whose ``modules`` compute with Liger's kernels with the same one without them, in fp32 and, if it
    will be computed in ``bf16``, in bf16. CapabilityError where the hidden states differ."""
    forwards = [module.forward for module in modules]
    precisions = (False, True) if bf16 else (False,)
    hidden = [probe_hidden(model, low) for low in precisions]
    restore_layers(modules)
    for low, got_NH in zip(precisions, hidden, strict=True):
        want_NH = probe_hidden(model, low)
        difference = float((got_NH - want_NH).norm() / want_NH.norm())
        # True also for NaN.
        if not difference < (AGREE_IN_BF16 if low else AGREE):
            raise CapabilityError(
                f"trainer.kernels = 'liger': {type(model.module).__name__} computes different results with Liger's "
                f"kernels (hidden states differ by {difference:.1e}, norm-wise, in {'bf16' if low else 'fp32'}). "
                "Remove the option."
            )
    for module, forward in zip(modules, forwards, strict=True):
        module.forward = forward


def _fuse(model: LoadedModel) -> bool:
    """Fuse the layers where that gives the same hidden states of one packed row. Returns whether all layers are
    fused."""
    if model.layout == "alone":
        return False
    before_NH = probe_hidden(model)
    layers = fuse_layers(model.module)
    if layers and not torch.allclose(probe_hidden(model), before_NH, rtol=1e-4, atol=1e-4):
        restore_layers(layers)
        return False
    return len(layers) == model.module.config.get_text_config().num_hidden_layers


@torch.no_grad()
def probe_hidden(model: LoadedModel, bf16: bool = False) -> Tensor:
    """fp32 [7, hidden], of two sequences."""
    device = _device(model)
    ids_N = torch.arange(7, device=device) % model.vocabulary
    with in_fp32(model.module), torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return model.hidden(ids_N, torch.tensor([0, 1, 2, 3, 0, 1, 2], device=device), [4, 3]).float()


def _device(model: LoadedModel) -> torch.device:
    return next(model.module.parameters()).device
