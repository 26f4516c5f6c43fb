"""Models whose weights are stored in bf16 (``ModelSpec.storage``).

They compute under autocast, like models with fp32 weights. Autocast rounds fp32 weights to bf16 before every matrix
product, so the products are the same. Everything else is computed in fp32 from the stored values: the residual stream,
norms, and the head's logits. So the results are bit-equal to those of the same values stored in fp32.

Autocast does not cover all of this: embeddings would start a bf16 residual stream, norms would
compute in bf16 or refuse mixed formats, and the probes of a model run without autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from rlhf.errors import ConfigError
from rlhf.interfaces import ModelSpec
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rlhf_modeling.config import HeadFp32, rounds_factors

BF16 = torch.bfloat16
DTYPES = {"fp32": torch.float32, "bf16": BF16}
_UNMIXED = frozenset(
    {
        "linear", "embedding", "layer_norm", "group_norm", "conv1d", "conv2d", "conv3d", "einsum", "matmul",
        "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "grouped_mm", "addmm_",
    }
)  # fmt: skip
"""Functions of torch that do not accept tensors of several number formats. Others promote them."""
_DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


def check_storage(spec: ModelSpec) -> None:
    """Raises ConfigError if ``spec.storage`` is unknown, or does not fit ``spec.dtype``."""
    if spec.storage not in DTYPES:
        raise ConfigError(f"storage = {spec.storage!r} is not known: use 'fp32' or 'bf16'")
    if spec.storage == "bf16" and spec.dtype == "fp32":
        raise ConfigError(
            f"role {spec.role.name!r} has storage = 'bf16' and dtype = 'fp32'. Weights that are stored in bf16 are "
            "computed with in bf16: set dtype = 'auto' or 'bf16', or storage = 'fp32'."
        )


def in_bf16(module: nn.Module) -> bool:
    """Whether some weights of ``module`` are stored in bf16."""
    return any(p.dtype == BF16 for p in module.parameters())


def widen(module: nn.Module) -> None:
    """Let embeddings and norms of a model that is stored in bf16 compute in fp32."""
    for part in module.modules():
        if type(part) is nn.Embedding:
            part.forward = partial(_rows, part)  # type: ignore[method-assign]
        elif isinstance(part, nn.Embedding):  # a subclass with a custom forward (scaled, learned positions)
            part.register_forward_hook(lambda _, __, out: out.float())
        elif _is_norm(part):
            part.forward = partial(_normed, part, part.forward)


def _rows(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    rows: Tensor = _TableRows.apply(ids, embedding.weight, embedding.padding_idx)
    return rows


class _TableRows(torch.autograd.Function):
    """fp32 rows of a bf16 table. Gradients of a row are added in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table_VH: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.padding = table_VH.shape, table_VH.dtype, padding
        return table_VH[ids].float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding
        sums_VH = torch.ops.aten.embedding_dense_backward(grad.float(), ids, ctx.shape[0], padding, False)
        return None, sums_VH.to(ctx.dtype), None


def _is_norm(part: nn.Module) -> bool:
    """A module that owns vectors only, such as a norm's weight and bias."""
    owned = [p for p in part._parameters.values() if p is not None]
    shapes = [getattr(p, "ds_shape", p.shape) for p in owned]  # ds_shape: the whole shape, if weights are divided
    return bool(owned) and not part._modules and all(len(shape) == 1 for shape in shapes)


def _normed(norm: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The module's own forward, with its vectors in fp32."""
    # The table itself is changed, because setattr accepts only parameters. float() is part of the graph, so the
    # gradient reaches the stored vector.
    stored = dict(norm._parameters)
    try:
        for name, p in stored.items():
            norm._parameters[name] = None if p is None else p.float()  # type: ignore[assignment]
        return plain(*args, **kwargs)
    finally:
        for name, p in stored.items():
            norm._parameters[name] = p


def head_product(head: nn.Linear, fp32: HeadFp32) -> Callable[[Tensor], Tensor] | None:
    """The product with a head's weights in a different precision; None: use the head's own product. The weights are
    converted once here, so that chunks of tokens add their gradients in fp32.

    Args:
        fp32: ``trainer.head_fp32``. ``"sums"`` has an effect under autocast.
    """
    device = head.weight.device.type
    sums = rounds_factors(fp32, device) and torch.is_autocast_enabled(device)
    if not fp32 or (head.weight.dtype == torch.float32 and not sums):
        return None
    weight_VH, bias_V = head.weight.float(), None if head.bias is None else head.bias.float()
    if not sums:
        return lambda hidden_CH: F.linear(hidden_CH, weight_VH, bias_V)
    rounded_VH = head.weight.detach().to(BF16)

    def multiply(hidden_CH: Tensor) -> Tensor:
        logits_CV: Tensor = _RoundedProduct.apply(hidden_CH, weight_VH, rounded_VH)
        return logits_CV if bias_V is None else logits_CV + bias_V

    return multiply


class _RoundedProduct(torch.autograd.Function):
    """Rounds the factors to bf16, also in the backward pass; sums and results are fp32."""

    @staticmethod
    def forward(ctx: Any, hidden_CH: Tensor, weight_VH: Tensor, rounded_VH: Tensor) -> Tensor:
        hidden_CH = hidden_CH.to(BF16)
        ctx.save_for_backward(hidden_CH, rounded_VH)
        return fp32_sums(hidden_CH, rounded_VH.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_CV: Tensor) -> tuple[Tensor | None, ...]:
        hidden_CH, rounded_VH = ctx.saved_tensors
        grad_CV = grad_CV.to(BF16)
        of_hidden = fp32_sums(grad_CV, rounded_VH) if ctx.needs_input_grad[0] else None
        of_weight = fp32_sums(grad_CV.T, hidden_CH) if ctx.needs_input_grad[1] else None
        return of_hidden, of_weight, None


def fp32_sums(a: Tensor, b: Tensor) -> Tensor:
    """fp32 product of bf16 matrices. torch does not have it on a CPU. The matrices are converted there, because
    products of two bf16 numbers are exact in fp32."""
    return torch.mm(a.float(), b.float()) if a.device.type == "cpu" else torch.mm(a, b, out_dtype=torch.float32)


def in_fp32(module: nn.Module) -> AbstractContextManager[Any]:
    """Context, without autocast, in which a model that is stored in bf16 computes in fp32. For probes."""
    return _InFp32() if in_bf16(module) else nullcontext()


class _InFp32(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _DTYPE and args[0].dtype == BF16:  # some models convert to the number format of a weight
            return torch.float32
        if getattr(func, "__name__", "") in _UNMIXED:
            args = tuple(_wide(a) for a in args)
            kwargs = {name: _wide(a) for name, a in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == BF16 else value
