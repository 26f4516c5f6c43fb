"""A role's model as body and head, and the computation of a micro-batch's sequences.

The *layout* is determined when the model is loaded (:mod:`rlhf_modeling.probe`):

- ``shared``: one row of packed sequences; a prefix that several sequences share is computed once.
- ``packed``: one row of packed sequences, each computed whole.
- ``alone``: transformers' own attention and no packing. Sequences of equal length are the rows of one call, without
  padding; each length needs a separate call. This is correct for every causal model, but slower.

Shape suffixes: N tokens of a micro-batch, M <= N computed tokens, H hidden size, C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from rlhf.errors import ModelError, TrainingError
from rlhf.ops.experts import UNKNOWN
from rlhf.ops.heads import OutputHead, shape_logits
from rlhf.ops.spans import moved
from rlhf.types import Image
from torch import Tensor, nn

from rlhf_modeling.attention import LayerKind, attend_with, packed
from rlhf_modeling.config import HeadFp32
from rlhf_modeling.images.row import ImageInputs
from rlhf_modeling.rope import LengthRope
from rlhf_modeling.router_replay import Routers, replayed
from rlhf_modeling.shared_prefixes import Shared, share_prefixes
from rlhf_modeling.stored import head_product
from rlhf_modeling.token_parts import PartAttention, RowPart, TokenGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Literal["shared", "packed", "alone"]
Images = Sequence[tuple[Image, ...]]
"""The images of each sequence, in order; empty if no sequence has one."""


@dataclass(slots=True)
class LoadedModel:
    """A role's model: ``body`` returns hidden states, ``head`` maps them to logits or scalars."""

    module: PreTrainedModel
    body: nn.Module
    head: nn.Linear
    kind: str
    """``lm`` | ``scalar`` | ``classes:N``."""
    softcap: float | None = None
    """Gemma 2's ``final_logit_softcapping``: logits become ``softcap * tanh(logits / softcap)``."""
    logit_scale: float = 1.0
    """The model multiplies its logits by this number (Granite, Cohere, Falcon-H1), before ``softcap``."""
    attention: str = "auto"
    """``auto`` | ``sdpa`` | ``flash``: the kernel on a GPU for packed sequences."""
    layers: frozenset[LayerKind] = frozenset()
    """The kinds of layers under packed attention, with short windows (:mod:`rlhf_modeling.probe`)."""
    fresh_head: bool = False
    """The checkpoint has no head of this kind (a causal language model under a scalar role)."""
    positions: int | None = None
    """Number of learned position embeddings (GPT-2, OPT): no sequence may be longer. None: the model has none."""
    rope: LengthRope | None = None
    """Set if the frequencies of the rotary embedding depend on a sequence's length."""
    layout: Layout = "shared"
    boundaries: bool = False
    """The boundaries of packed sequences are passed to the model, for the kernels of its recurrent layers."""
    noisy: bool = False
    """The model draws random noise in training (dropout, router jitter)."""
    notes: tuple[str, ...] = ()
    """Remarks about the layout, for the log."""
    maximum: Callable[[int], int] | None = None
    """Maps a number of this rank to the maximum over all ranks. Set if all ranks must call the body equally often, and
    compute the vision tower whenever one does."""
    computing: Sequence[int] = ()
    """Lengths of the sequences in the current call of the body."""
    divided_over: TokenGroup | None = None
    """The ranks that divide the tokens of every row among them; None: a rank computes whole rows. Set after all
    comparisons (:mod:`rlhf_modeling.probe`, kernels)."""
    part: RowPart | None = None
    """This rank's part of the latest row; None if rows are whole."""
    image_text: bool = False
    """transformers has an image-text model for the folder's config, even if this model is only its language model."""
    images: ImageInputs | None = None
    """Set if the model reads images."""
    device: torch.device | None = None
    """Device of the model; None: the device of the tokens."""
    no_images: str = "reads text only"
    """Why the model does not read images."""
    routers: Routers | None = None
    """Set if recorded experts are replayed (``trainer.router_replay``)."""

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: token ids are below it."""
        embedding: Any = self.module.get_input_embeddings()
        return int(embedding.num_embeddings)

    @property
    def outer_ids(self) -> set[int]:
        """Ids of the parameters of the embedding and the head, whose matrices Muon does not update."""
        return {id(p) for part in (self.module.get_input_embeddings(), self.head) for p in part.parameters()}

    def require_positions(self, lens: Sequence[int]) -> None:
        """Raises ModelError if a sequence is longer than the number of the model's positions."""
        if self.positions is not None and max(lens) > self.positions:
            raise ModelError(
                f"a sequence has {max(lens)} tokens, but the model has learned embeddings for {self.positions} "
                f"positions only. Set data.max_tokens = {self.positions} or less."
            )

    # ------------------------------------------------------------------------------------- hidden states

    def hidden(self, ids_N: Tensor, position_N: Tensor, lens: Sequence[int], images_B: Images = ()) -> Tensor:
        """[N, H]: hidden states of concatenated sequences."""
        hidden_MH, place_N = self.compute(ids_N, position_N, lens, False, images_B)
        return hidden_MH if place_N is None else hidden_MH[place_N]

    def compute(
        self,
        ids_N: Tensor,
        position_N: Tensor,
        lens: Sequence[int],
        share: bool,
        images_B: Images = (),
        experts_NLK: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """([M, H], the index of each of the N tokens among them; None: the token's own index). If rows are divided over
        ranks, only the hidden states of :attr:`part`. The indices are on the device of the ids.

        Args:
            ids_N: on the CPU if :attr:`device` is set, because their values are read. The same holds for positions and
                experts.
            share: compute common prefixes once, if the layout is ``shared``.
            images_B: the images of each sequence; empty: no images.
            experts_NLK: the experts to which :attr:`routers` send the tokens; negative: the routers choose.

        Raises TrainingError if there are images but the model does not read them.
        """
        if images_B and self.images is None:
            raise TrainingError(f"a batch has images, but {type(self.module).__name__} {self.no_images}")
        tokens = _Tokens(ids_N, position_N, lens, images_B, experts_NLK)
        if self.layout != "alone" and self.rope is None:
            return self._call(tokens, share)
        calls = self._calls(lens)
        extra = 0 if self.maximum is None else self.maximum(len(calls)) - len(calls)
        if len(calls) == 1 and not extra:
            return self._call(tokens, share)
        starts = [0, *accumulate(lens)]
        parts: list[Tensor] = []
        place_N, rows = torch.empty_like(ids_N), 0
        for call in calls:
            index_C = torch.cat([torch.arange(starts[b], starts[b + 1], device=ids_N.device) for b in call])
            hidden_CH, place_C = self._call(tokens.of_call(call, index_C), share)
            own_C = torch.arange(len(index_C), device=ids_N.device) if place_C is None else place_C
            place_N[index_C] = rows + own_C
            parts.append(hidden_CH)
            rows += len(hidden_CH)
        hidden_MH = torch.cat(parts)
        for _ in range(extra):  # an extra call with one token; its result is not used
            extra_1H, _ = self._call(_Tokens(ids_N[:1], torch.zeros_like(position_N[:1]), [1]), share=False)
            # In the graph, so that the backward pass also makes the same number of calls on every rank.
            hidden_MH = hidden_MH + 0.0 * extra_1H
        return hidden_MH, place_N

    def _calls(self, lens: Sequence[int]) -> list[list[int]]:
        """The sequences of each call of the body: those of equal length, or with equal frequencies."""
        calls: dict[int, list[int]] = {}
        for b, length in enumerate(lens):
            kind = length if self.layout == "alone" or self.rope is None else self.rope.kind(length)
            calls.setdefault(kind, []).append(b)
        return [calls[kind] for kind in sorted(calls)]

    def _call(self, tokens: _Tokens, share: bool) -> tuple[Tensor, Tensor | None]:
        has_images = any(tokens.images_B)
        if self.images is not None and (has_images if self.maximum is None else self.maximum(has_images)):
            if self.divided_over is not None:
                raise TrainingError("a batch has images, but rows are divided over ranks: set sequence_parallel = 1")
            return self._call_with_images(self.images, tokens if has_images else replace(tokens, images_B=()), share)
        self.computing = tokens.lens
        with self.rope.forgotten() if self.rope is not None else nullcontext():
            if self.layout == "alone":
                with replayed(self._on_device(tokens.experts_NLK)):
                    return self._body(input_ids=tokens.ids_N.view(len(tokens.lens), -1)).flatten(0, 1), None
            shared = None
            if share and self.layout == "shared":
                shared = share_prefixes(tokens.ids_N, tokens.lens, experts_NLK=tokens.experts_NLK)
            if self.divided_over is not None:
                return self._call_on_part(self.divided_over, tokens, shared)
            row = tokens if shared is None else tokens.without_repeats(shared)
            bounds = sequence_bounds(tokens.lens, tokens.ids_N.device) if self.boundaries else {}
            with packed(tokens.lens, shared, self.attention), replayed(self._on_device(row.experts_NLK)):
                hidden_1MH = self._body(input_ids=row.ids_N[None], position_ids=row.position_N[None], **bounds)
        return hidden_1MH.squeeze(0), None if shared is None else shared.place_N

    def _call_on_part(self, group: TokenGroup, tokens: _Tokens, shared: Shared | None) -> tuple[Tensor, Tensor | None]:
        """Compute this rank's part of the row. A row of fewer tokens than ranks gets an extra sequence, so that every
        rank computes a token."""
        row = tokens
        if shared is not None and shared.ids_M.numel() >= group.ranks:
            row = tokens.without_repeats(shared)
        else:
            shared = None
            if (lacking := group.ranks - len(tokens.ids_N)) > 0:
                row = tokens.with_sequence(lacking)
        self.computing = row.lens
        self.part = part = RowPart(group, len(row.ids_N))
        experts_PLK = None if row.experts_NLK is None else part.local_rows(row.experts_NLK)
        with attend_with(PartAttention(part, row.lens, shared, self.attention)), replayed(self._on_device(experts_PLK)):
            hidden_1PH = self._body(
                input_ids=part.local_rows(row.ids_N)[None], position_ids=part.local_rows(row.position_N)[None]
            )
        return hidden_1PH.squeeze(0), None if shared is None else shared.place_N

    def _call_with_images(self, inputs: ImageInputs, tokens: _Tokens, share: bool) -> tuple[Tensor, Tensor | None]:
        """See :meth:`compute`. If ``tokens.images_B`` is empty, another rank has images."""
        blank, ids_N = not tokens.images_B, tokens.ids_N
        shared = None
        if share and self.layout == "shared" and not blank:
            shared = share_prefixes(ids_N, tokens.lens, tokens.images_B)
        row = inputs.row(ids_N, tokens.position_N, tokens.lens, tokens.images_B, shared)
        self.computing = row.lens
        with self.rope.forgotten() if self.rope is not None else nullcontext(), inputs.image_context(row):
            if self.layout == "alone":
                return self._body(**row.as_rows(len(tokens.lens))).flatten(0, 1), None
            bounds = sequence_bounds(row.lens, ids_N.device) if self.boundaries else {}
            with packed(row.lens, shared, self.attention):
                hidden_MH = self._body(**row.arguments, **bounds).squeeze(0)
        if blank:
            # The blank image stays in the graph, because every rank takes part in the tower's backward pass.
            hidden_MH = hidden_MH[: len(ids_N)] + 0.0 * hidden_MH[len(ids_N) :].sum(0)
        return hidden_MH, None if shared is None else shared.place_N

    def _body(self, **inputs: Any) -> Tensor:
        """The body's hidden states for the inputs, which are moved to the body's device."""
        arguments = {name: self._on_device(x) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        hidden: Tensor = self.body(**arguments, use_cache=False).last_hidden_state
        return hidden

    def _on_device(self, x: Tensor | None) -> Tensor | None:
        return x if x is None or self.device is None else moved(x, self.device)

    # -------------------------------------------------------------------------------------------- logits

    @property
    def output_head(self) -> OutputHead:
        """The output head. It shares memory with the model's head, which must be whole."""
        bias = self.head.bias
        bias_V = None if bias is None else bias.detach()
        return OutputHead(self.head.weight.detach(), bias_V, self.softcap, self.logit_scale)

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """[C, V] or [C, outputs of the head], in the precision of ``hidden_CH``."""
        return self.shaped(self.head(hidden_CH))

    def shaped(self, product_CV: Tensor) -> Tensor:
        """The logits, of the product of hidden states and the head's weights."""
        return shape_logits(product_CV, self.logit_scale, self.softcap)

    def logits_of(
        self, fp32: HeadFp32, product: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The function ``logits`` for one micro-batch.

        Args:
            fp32: ``trainer.head_fp32``. See :func:`rlhf_modeling.stored.head_product`.
            product: the product with the head's weights in their own precision; None: a call of the head.
        """
        multiply = head_product(self.head, fp32) or product or self.head
        return lambda hidden_CH: self.shaped(multiply(hidden_CH))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Concatenated sequences."""

    ids_N: Tensor
    position_N: Tensor
    lens: Sequence[int]
    images_B: Images = ()
    experts_NLK: Tensor | None = None

    def of_call(self, sequences: Sequence[int], index_C: Tensor) -> _Tokens:
        """These sequences, whose tokens have the indices ``index_C``."""
        images_C = [self.images_B[b] for b in sequences] if self.images_B else ()
        experts_CLK = None if self.experts_NLK is None else self.experts_NLK[index_C]
        lens_C = [self.lens[b] for b in sequences]
        return _Tokens(self.ids_N[index_C], self.position_N[index_C], lens_C, images_C, experts_CLK)

    def without_repeats(self, shared: Shared) -> _Tokens:
        """The tokens that are computed, each shared prefix once."""
        experts_MLK = None if self.experts_NLK is None else self.experts_NLK[shared.source_M]
        return _Tokens(shared.ids_M, shared.position_M, self.lens, (), experts_MLK)

    def with_sequence(self, tokens: int) -> _Tokens:
        """The same with one more sequence of this many tokens."""
        experts_NLK = self.experts_NLK
        if experts_NLK is not None:
            unknown = torch.full_like(experts_NLK[:1], UNKNOWN).expand(tokens, -1, -1)
            experts_NLK = torch.cat([experts_NLK, unknown])
        ids_N = torch.cat([self.ids_N, self.ids_N[:1].expand(tokens)])
        position_N = torch.cat([self.position_N, torch.arange(tokens, device=ids_N.device)])
        return _Tokens(ids_N, position_N, [*self.lens, tokens], (), experts_NLK)


def sequence_bounds(lens: Iterable[int], device: torch.device) -> dict[str, Any]:
    """Boundaries of packed sequences, under the argument names that transformers passes to its kernels."""
    lengths_B = torch.tensor(list(lens), device=device)
    ends = torch.cat([lengths_B.new_zeros(1), lengths_B.cumsum(0)]).to(torch.int32)
    number_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=device), lengths_B).to(torch.int32)
    longest = int(lengths_B.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": number_N[None],
    }
