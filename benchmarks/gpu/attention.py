"""The kernels of packed attention against float64: outputs and gradients, with shared prefixes, windows, groups of
heads, several head sizes and a sequence of one token; and whether a rerun gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from parts import Part, Section
from rlhf.errors import CapabilityError
from rlhf_modeling.determinism import determinism, prepare_determinism
from rlhf_modeling.flash_attention import flash_attention
from rlhf_modeling.flash_attention import lay_out as flash_lay_out
from rlhf_modeling.sdpa_attention import Options, collect, sdpa_attention
from rlhf_modeling.shared_prefixes import Stretch
from torch import Tensor

LIMIT = 2e-2
"""Largest distance from float64, relative to its norm: outputs and gradients are rounded to bf16, and the softmax's
weights are rounded before their product."""
NAMES = ("out", "dq", "dk", "dv")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def __str__(self) -> str:
        window = f", window {self.window}" if self.window else ""
        return f"heads {self.heads}/{self.kv_heads} of {self.head_dim}{window}"


SHAPES = (
    Shape(16, 8, 128),
    Shape(14, 2, 64),
    Shape(16, 8, 128, window=64),
    Shape(8, 4, 256),
    Shape(8, 8, 80, window=33),
    Shape(12, 2, 96),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Packed sequences; the second one shares a prefix of the first. N tokens, M of them computed."""

    stretches: tuple[Stretch, ...]
    place_N: Tensor
    computed: int

    @classmethod
    def of(cls, first: int, shared: int, second: int, last: int, device: str) -> Row:
        """Sequences of ``first``, ``second`` (of which ``shared`` tokens are those of the first), 1 and ``last``."""
        tail = second - shared
        stretches = (
            Stretch(0, 0, first, 0),
            Stretch(first, shared, second, first),
            Stretch(first + tail, 0, 1, first + second),
            Stretch(first + tail + 1, 0, last, first + second + 1),
        )
        computed = first + tail + 1 + last
        places = [*range(first), *range(shared), *range(first, computed)]
        return cls(stretches, torch.tensor(places, device=device), computed)


def run(section: Section) -> None:
    prepare_determinism(torch.device(section.device))
    row = Row.of(*((90, 20, 80, 120) if section.small else (300, 200, 277, 900)), section.device)
    for shape in SHAPES:
        section.part(str(shape), partial(check, row, shape, section.device))


def check(row: Row, shape: Shape, device: str, part: Part) -> None:
    torch.manual_seed(shape.heads + shape.head_dim)
    counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    *inputs, grad_NHD = (torch.randn(row.computed, n, shape.head_dim, device=device).bfloat16() for n in counts)
    options = Options(shape.head_dim**-0.5, 0.0, shape.window, None)
    exact = learn(partial(stated, row, options), [x.double() for x in inputs], grad_NHD.double())
    for name, kernel in kernels(row, options, device).items():
        first, second = (learn(kernel, inputs, grad_NHD) for _ in range(2))
        figures = part.figures[name] = {}
        for quantity, tensor, reference in zip(NAMES, first, exact, strict=True):
            figures[quantity] = difference = float((tensor.double() - reference).norm() / reference.norm())
            part.at_most(f"{name}: {quantity} apart from float64", difference, LIMIT)
        figures["equal on a rerun"] = same(first, second)
        try:
            with determinism(True):
                first, second = (learn(kernel, inputs, grad_NHD) for _ in range(2))
        except CapabilityError as error:
            figures["deterministic mode"] = str(error)
            part.holds(f"{name} has a deterministic form", False)
        else:
            part.holds(f"{name}: equal on a rerun in deterministic mode", same(first, second))


def kernels(row: Row, options: Options, device: str) -> dict[str, Attend]:
    """Those that can run on the device."""
    target = torch.device(device)
    runs = collect(row.stretches, row.computed, row.place_N, target)

    def sdpa(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        out_LHD = sdpa_attention(q_NHD, k_NKD, v_NKD, runs, options)
        return torch.empty_like(q_NHD).index_copy(0, runs.own_L, out_LHD)

    if device != "cuda":
        return {"sdpa": sdpa}
    lines = flash_lay_out(row.stretches, row.computed, row.place_N, target)
    return {"flash": lambda q, k, v: flash_attention(q, k, v, lines, options), "sdpa": sdpa}


def stated(row: Row, options: Options, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
    """Sequence by sequence as the formula has it: query i sees the keys i - window + 1 .. i."""
    out, groups = [], q_NHD.shape[1] // k_NKD.shape[1]
    for s in row.stretches:
        keys = row.place_N[s.first : s.first + s.length]
        k_THD, v_THD = (x[keys].repeat_interleave(groups, 1) for x in (k_NKD, v_NKD))
        scores = torch.einsum("qhd,khd->hqk", q_NHD[s.start : s.start + s.length - s.skip], k_THD) * options.scaling
        every = torch.arange(s.length, device=q_NHD.device)
        distance = every[s.skip :, None] - every
        hidden = (distance < 0) | (distance >= (options.window or s.length))
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v_THD))
    return torch.cat(out)


def learn(kernel: Attend, inputs: Sequence[Tensor], grad_NHD: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = kernel(*leaves)
    out.backward(grad_NHD)
    grads = [x.grad for x in leaves if x.grad is not None]
    return [out.detach(), *grads]


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
