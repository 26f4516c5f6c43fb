"""Attention over packed rows: the linear layers see flat tokens, attention sees one sequence at a time.

transformers' own packed path compares every token with every other of the row (quadratic in the pack) and, with the
default ``use_cache``, silently lets sequences attend to each other. Here the lengths are passed explicitly::

    use_packed_attention(model)
    with packed(lens):                                   # sums to N
        model(input_ids=ids_N[None], position_ids=position_N[None], use_cache=False)

The attention is registered with ``AttentionInterface`` without a mask function, so transformers builds no mask.

If sequences share prefixes (:mod:`rlhf_modeling.shared_prefixes`), the row holds each prefix once. A sequence then has
queries only for its own tokens, but keys for the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from rlhf.errors import ModelError
from torch import Tensor

from rlhf_modeling import flash_attention
from rlhf_modeling.flash_attention import Lines
from rlhf_modeling.images.architecture import has_vision
from rlhf_modeling.matmul_attention import LONGEST, Buckets, lay_out, matmul_attention
from rlhf_modeling.sdpa_attention import Options, SequenceRuns, collect, sdpa_attention
from rlhf_modeling.shared_prefixes import Shared, Stretch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rlhf_packed"

HARMLESS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"})
"""Arguments that layers pass to every attention function. They are ignored here."""

Route = Callable[..., tuple[Tensor, Tensor | None]]
"""``route(module, q, k, v, mask, scaling=..., dropout=..., sliding_window=..., **others)``, as transformers calls an
attention function: q [1, H, N, D], k and v [1, K, N, D]; returns ([1, N, H, D], None)."""

_route: ContextVar[Route | None] = ContextVar("rlhf_attention_route", default=None)


@contextmanager
def attend_with(route: Route) -> Iterator[None]:
    """Context in which every attention layer of a model under :func:`use_packed_attention` calls ``route``."""
    token = _route.set(route)
    try:
        yield
    finally:
        _route.reset(token)


@contextmanager
def packed(lens: Sequence[int], shared: Shared | None = None, kernel: str = "auto") -> Iterator[None]:
    """Context in which the model's single row holds sequences of these lengths, and each attends only to itself. With
    ``shared`` the row holds only their computed tokens.

    Args:
        kernel: ``auto`` | ``sdpa`` | ``flash``, on a GPU.
    """
    with attend_with(PackedAttention(lens, shared, kernel)):
        yield


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a kernel must compute for a layer."""

    heads: int
    key_heads: int
    size: int
    """Size of a query and a key."""
    value_size: int
    scaling: float
    window: int | None
    softcap: float | None

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(heads, size) of queries, keys and values."""
        return (self.heads, self.size), (self.key_heads, self.size), (self.key_heads, self.value_size)


_kinds: ContextVar[set[LayerKind] | None] = ContextVar("rlhf_attention_kinds", default=None)


@contextmanager
def kinds_of_layers() -> Iterator[set[LayerKind]]:
    """A set that gets the kind of every layer that is computed by packed attention inside the context."""
    kinds: set[LayerKind] = set()
    token = _kinds.set(kinds)
    try:
        yield kinds
    finally:
        _kinds.reset(token)


def attention_route() -> Route | None:
    """The route of the enclosing context; None outside of a context."""
    return _route.get()


def current_route() -> Route:
    """The result of :func:`attention_route`, which must not be None."""
    route = _route.get()
    if route is None:
        raise ModelError(
            "the model uses packed attention but no lengths are given: call it inside "
            "rlhf_modeling.attention.packed(lens)"
        )
    return route


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make every attention layer of ``model`` use the route of the enclosing context.

    Raises ModelError if the class does not accept an attention function. For other classes, a comparison checks whether
    packing is correct (:mod:`rlhf_modeling.probe`).
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    part, cause = _attending(model), None
    try:
        part.set_attn_implementation(NAME)
    except ValueError as refused:
        cause = refused
    if cause is not None or part.config.get_text_config()._attn_implementation != NAME:
        raise ModelError(
            f"{type(model).__name__} does not take an attention function through transformers' AttentionInterface"
        ) from cause


def use_attention(model: PreTrainedModel, name: str) -> bool:
    """Set an attention function of transformers in ``model``. Returns whether its class accepts one after loading."""
    part = _attending(model)
    try:
        part.set_attn_implementation(name)
    except ValueError:
        return False
    return part.config.get_text_config()._attn_implementation == name


def _attending(model: PreTrainedModel) -> PreTrainedModel:
    """The part of the model whose attention is set. A vision tower keeps its own attention."""
    part: PreTrainedModel = model.get_decoder() if has_vision(model) else model
    return part


def _attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
    return current_route()(module, q, k, v, mask, **options)


class PackedAttention:
    """The attention of one packed row: causal, and separate for each sequence.

    On a CPU, :mod:`rlhf_modeling.matmul_attention` computes short sequences. Longer ones use one
    ``scaled_dot_product_attention`` per run of sequences of equal length, in fp32 even under bf16, because the backward
    pass of the bf16 kernel is several times slower there. On a GPU under bf16, one call of
    :mod:`rlhf_modeling.flash_attention` computes all sequences if layer and platform allow it. Otherwise they are
    computed in runs, as on a CPU.

    In fp32 on a CPU the result is bit-equal to computing one sequence at a time; gradients of weights differ by the
    order of summation. With ``shared`` prefixes a sequence's kernel also depends on the length of its shared prefix, so
    the result is equal up to rounding.
    """

    def __init__(self, lens: Sequence[int], shared: Shared | None = None, kernel: str = "auto") -> None:
        self.lens, self._kernel = list(lens), kernel
        self._lines: Lines | None = None
        if shared is None:
            starts = [0, *accumulate(lens)][:-1]
            self._stretches = tuple(Stretch(s, 0, n, s) for s, n in zip(starts, lens, strict=True))
            self.tokens = sum(lens)
        else:
            self._stretches, self.tokens = shared.stretches, int(shared.ids_M.numel())
        self._place = None if shared is None else shared.place_N
        self._plans: dict[int, tuple[Buckets | None, SequenceRuns | None]] = {}
        self._without_flash: dict[torch.dtype, bool] = {}

    def __call__(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        self._check(module, q, k, mask, s_aux, is_causal, dropout)
        if unknown := sorted(n for n, x in arguments.items() if isinstance(x, Tensor) and n not in HARMLESS):
            raise ModelError(
                f"{type(module).__name__} passes {', '.join(unknown)} to its attention function, which packed "
                "attention does not support"
            )
        on_cpu, dtype = q.device.type == "cpu", self.computes(q, v)
        options = Options(scaling if scaling is not None else q.shape[-1] ** -0.5, dropout, sliding_window, softcap)
        if (kinds := _kinds.get()) is not None:
            sizes = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
            kinds.add(LayerKind(*sizes, options.scaling, sliding_window, softcap))
        plain = on_cpu and not dropout and softcap is None and k.shape == v.shape
        # Inputs are converted below. Autocast would round the fp32 inputs of scaled_dot_product_attention to bf16
        # again.
        with torch.autocast(q.device.type, enabled=False):
            if not on_cpu and self._flashes(q, k, v, dtype, options):
                return self._flash(q, k, v, dtype, options)[None], None
            buckets, runs = self._plan(LONGEST.get(dtype, 0) if plain else 0, q.device)
            flat = [x.squeeze(0).transpose(0, 1) for x in (q, k, v)]
            out_NHD: Tensor | None = None
            if buckets is not None:
                low = [x.to(dtype) for x in flat]
                out_NHD = matmul_attention(low[0], low[1], low[2], buckets, options.scaling, sliding_window)
            if runs is not None:
                high = [x.to(torch.float32 if on_cpu else dtype) for x in flat]
                long_LHD = sdpa_attention(high[0], high[1], high[2], runs, options).to(dtype)
                # The rows of long sequences in the first result are undefined. index_copy gives them no gradient
                # either.
                out_NHD = long_LHD if out_NHD is None else out_NHD.index_copy(0, runs.own_L, long_LHD)
        assert out_NHD is not None
        return out_NHD[None], None

    @staticmethod
    def computes(q: Tensor, v: Tensor) -> torch.dtype:
        """The dtype of the result."""
        kind = q.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else v.dtype

    def _flashes(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, options: Options) -> bool:
        if self._kernel == "sdpa" or not flash_attention.fits(q, k, v, options):
            return False
        if dtype not in self._without_flash:  # the same for every layer, and slow: it queries the driver
            self._without_flash[dtype] = self._kernel != "flash" and bool(flash_attention.why_not(q.device, dtype))
        return not self._without_flash[dtype]

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, options: Options) -> Tensor:
        if self._lines is None:
            self._lines = flash_attention.lay_out(self._stretches, self.tokens, self._place, q.device)
        flat = [x.squeeze(0).transpose(0, 1).to(dtype) for x in (q, k, v)]
        return flash_attention.flash_attention(flat[0], flat[1], flat[2], self._lines, options)

    def _check(
        self, module: Any, q: Tensor, k: Tensor, mask: Any, s_aux: Any, is_causal: bool | None, dropout: float
    ) -> None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        if mask is not None or s_aux is not None or not causal:
            request = (
                "a mask" if mask is not None else "attention sinks" if s_aux is not None else "non-causal attention"
            )
            raise ModelError(f"{type(module).__name__} needs {request}, which packed attention does not support")
        if q.shape[0] != 1 or q.shape[2] != self.tokens or k.shape[2] != self.tokens:
            raise ModelError(
                f"packed attention is set up for one row of {self.tokens} tokens but got queries {tuple(q.shape)} and "
                f"keys {tuple(k.shape)} [batch, heads, tokens, head size]"
            )
        if dropout and self._place is not None:
            raise ModelError(
                f"{type(module).__name__} uses dropout = {dropout} on shared prefixes, so sequences would share one "
                "dropout mask. Set trainer.shared_prefixes = false"
            )

    def _plan(self, short: int, device: torch.device) -> tuple[Buckets | None, SequenceRuns | None]:
        """(sequences of up to ``short`` tokens, longer sequences)."""
        if short not in self._plans:
            small = [s for s in self._stretches if s.length <= short]
            large = [s for s in self._stretches if s.length > short]
            self._plans[short] = (
                lay_out(small, self.tokens, self._place) if small else None,
                collect(large, self.tokens, self._place, device) if large else None,
            )
        return self._plans[short]
