"""The optimizer of a role's parameters: decay groups, clipping by the global norm, state by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from rlhf.saved import refuse
from torch import Tensor, nn

from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.state import not_finite


class OrthogonalAdamW(torch.optim.AdamW):
    """Uses Muon's step for groups with ``muon = True``, and AdamW's for the others.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal
    matrix. The step is as large as AdamW's (Liu et al. 2025, arXiv:2502.16982): 0.2 sqrt(the longer side) times the
    rate.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        # AdamW's step() updates everything in self.param_groups.
        try:
            self.param_groups = [g for g in groups if not g.get("muon")]
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("muon"):
                self.muon_step(group)

    def muon_step(self, group: dict[str, Any]) -> None:
        """Muon's step for whole matrices, by torch's own functions, with the state of this optimizer."""
        options = {key: group[key] for key in ("lr", "weight_decay", "momentum")}
        # A second optimizer, because torch's Muon refuses parameters that are not matrices. Its state is kept here.
        muon = torch.optim.Muon(group["params"], **options, adjust_lr_fn="match_rms_adamw")
        muon.state = self.state
        muon.step()


Parameters = dict[str, nn.Parameter]
ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum_buffer",)
"""Names of the optimizers' state of a parameter."""


def build_optimizer(
    parameters: Mapping[str, nn.Parameter],
    shapes: Mapping[str, torch.Size],
    adamw_ids: Collection[int],
    config: TrainingConfig,
    with_muon: type[OrthogonalAdamW] = OrthogonalAdamW,
) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019), or ``with_muon`` if configured. Weight decay applies to matrices, not to
    vectors (norms, biases). With Muon, the layers' matrices are a group with ``muon = True``.

    Args:
        shapes: shapes of whole parameters; this rank may hold a part of each.
        adamw_ids: ids of the parameters of embeddings and heads, whose matrices stay with AdamW. So do the stacked
            matrices of experts, which have three dimensions.
    """
    muon = config.optimizer == "muon"
    chosen = [n for n, p in parameters.items() if muon and len(shapes[n]) == 2 and id(p) not in adamw_ids]
    rest = [n for n in parameters if n not in set(chosen)]
    kinds: list[tuple[list[str], dict[str, Any]]] = [
        (chosen, {"weight_decay": config.weight_decay, "muon": True, "momentum": config.muon_momentum}),
        ([n for n in rest if len(shapes[n]) >= 2], {"weight_decay": config.weight_decay}),
        ([n for n in rest if len(shapes[n]) < 2], {"weight_decay": 0.0}),
    ]
    groups = [{"params": [parameters[n] for n in names], **facts} for names, facts in kinds if names]
    make = with_muon if muon else torch.optim.AdamW
    return make(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_rates(optimizer: torch.optim.Optimizer, config: TrainingConfig, factor: float) -> None:
    """Set each group's rate to the peak rate of the config times the schedule's factor."""
    muon = config.lr if config.muon_lr is None else config.muon_lr
    for group in optimizer.param_groups:
        group["lr"] = (muon if group.get("muon") else config.lr) * factor


def clip(parameters: Parameters, max_norm: float | None) -> float:
    """Scale gradients down to the global L2 norm ``max_norm``. Returns the norm before scaling, which may not be
    finite."""
    grads = [p.grad for p in parameters.values() if p.grad is not None]
    if not grads:
        return 0.0
    norm = torch.nn.utils.get_total_norm(grads)
    value = float(norm)
    # Infinity would turn gradients into 0 and NaN. The caller skips a step with such a norm.
    if max_norm is not None and value > max_norm and value != float("inf"):
        torch._foreach_mul_(grads, max_norm / (value + 1e-6))
    return value


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Tensor]:
    """{``<parameter>/<state>``: tensor}. Parameters that no step has changed have no entry."""
    return {
        f"{name}/{key}": value
        for name, p in parameters.items()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def to_host(tensors: MutableMapping[str, Tensor]) -> None:
    """Replace tensors on a GPU by copies in pinned host memory."""
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.is_cuda:
            tensors[name] = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)


def give_back(device: torch.device) -> None:
    """Free cached GPU memory, so that other processes can use it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # Releases memory that was sent to another process and is no longer used there.
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def to_device(tensors: MutableMapping[str, Tensor], device: torch.device) -> None:
    """Undo :func:`to_host`."""
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            tensors[name] = value.to(device)


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    source: Path | str,
    stepped: Collection[str] = (),
) -> None:
    """Replace the optimizer's state by :func:`optimizer_tensors` of the run that saved it.

    Args:
        stepped: parameters that must have state, because they have had a gradient. Other parameters have all of their
            state or none.

    Raises CheckpointError, which names the tensor that is missing, unknown, or of another shape or number format.
    """
    _check_state(optimizer, parameters, tensors, source, stepped)
    optimizer.state.clear()
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        optimizer.state[parameters[name]][key] = value.to(parameters[name].device)


def _check_state(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, Tensor],
    source: Path | str,
    stepped: Collection[str],
) -> None:
    muon = {id(p) for group in optimizer.param_groups if group.get("muon") for p in group["params"]}
    keys = {n: MUON_STATE if id(p) in muon else ADAMW_STATE for n, p in parameters.items()}
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        if name not in parameters:
            refuse(source, f"{full_name}: this model has no parameter {name!r}.")
        if key not in keys[name]:
            refuse(source, f"{full_name}: unknown; the optimizer stores {', '.join(keys[name])} for this parameter.")
        p = parameters[name]
        shape, dtype = (torch.Size(), torch.float32) if key == "step" else (p.shape, p.dtype)
        if (value.shape, value.dtype) != (shape, dtype):
            actual = f"{value.dtype} of shape {tuple(value.shape)}"
            refuse(source, f"{full_name}: {actual}, expected {dtype} of shape {tuple(shape)}.")
        if problem := not_finite(value):
            refuse(source, f"{full_name}: {problem}.")
    for name in parameters:
        absent = [key for key in keys[name] if f"{name}/{key}" not in tensors]
        if absent and (name in stepped or len(absent) < len(keys[name])):
            refuse(source, f"{name}/{absent[0]}: missing.")
