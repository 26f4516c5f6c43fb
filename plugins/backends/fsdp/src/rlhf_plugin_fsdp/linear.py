"""Linear layers under autocast that keep their weight for the backward pass, not its bf16 copy.

Autograd would keep the copies of all layers until the backward pass: the whole model in bf16 on every rank. The weight
itself is freed between the passes and gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``x``: [..., I]; ``weight``: [O, I]; ``bias``: [O] or None. [..., O] in ``dtype``."""
        narrow = x.to(dtype)
        ctx.save_for_backward(narrow, weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            return _plain(narrow, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        narrow, weight = ctx.saved_tensors
        wide, of_bias = ctx.dtypes
        rows_NO = grad.reshape(-1, grad.shape[-1])
        with torch.autocast(grad.device.type, enabled=False):
            dx = (grad @ weight.to(grad.dtype)).to(wide) if ctx.needs_input_grad[0] else None
            dweight = None
            if ctx.needs_input_grad[1]:
                dweight = (rows_NO.t() @ narrow.reshape(-1, narrow.shape[-1])).to(weight.dtype)
            dbias = rows_NO.sum(0).to(of_bias) if of_bias is not None and ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


_plain: Any = torch.nn.functional.linear


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        result: Tensor = _plain(x, weight, bias)
        return result
    return _Linear.apply(x, weight, bias, torch.get_autocast_dtype(device))


@contextmanager
def sparing_linear(enabled: bool) -> Iterator[None]:
    """Inside, torch's function for linear layers keeps their weight."""
    functional: Any = torch.nn.functional
    before = functional.linear
    if enabled:
        functional.linear = _linear
    try:
        yield
    finally:
        functional.linear = before
