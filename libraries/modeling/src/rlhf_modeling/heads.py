"""Outputs at selected tokens: hidden states -> logits -> head functions, chunk by chunk; no [N, V] tensor exists.

Shape suffixes: N tokens, A tokens under a head's mask, C tokens of a chunk, V vocabulary (or outputs of a scalar or
classes head), H hidden size, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rlhf.errors import ModelError, TrainingError
from rlhf.interfaces import ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.heads import ENTROPY, LOGPROBS, TOP1, OutputHead, gives, resolve_head
from rlhf.ops.spans import moved
from rlhf.types import Head
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlhf_modeling.shared_prefixes import take_rows
from rlhf_modeling.token_parts import RowPart

LAST_TOKEN = "last_token"


def positions(batch: Batch, head: Head) -> Tensor:
    """int64 [A]: the tokens under the head's mask; the last of each sequence for the mask ``last_token``."""
    if head.over == LAST_TOKEN:
        return batch.starts_B + batch.lens_B - 1
    if head.over not in batch.tok:
        raise TrainingError(f"head {head.name!r} needs the token mask {head.over!r}; the batch has {sorted(batch.tok)}")
    return batch.index(head.over)


def compute(
    hidden_NH: Tensor,
    batch: Batch,
    heads: Sequence[Head],
    logits: Callable[[Tensor], Tensor],
    place_N: Tensor | None = None,
    *,
    tempered: bool,
    chunk: int,
    head_fp32: bool,
    part: RowPart | None = None,
) -> dict[str, Tensor]:
    """{head name: [A, ...]}, fp32, with gradient if ``hidden_NH`` has one.

    Heads with the same mask and position share their logits. No logits are computed if all of these heads read hidden
    states. If a group has more than ``chunk`` tokens, each chunk's logits are discarded after use and recomputed in the
    backward pass.

    Args:
        logits: [C, H] -> [C, V].
        place_N: the row of ``hidden_NH`` for each token, so there may be fewer rows than tokens; None: row n for token
            n. On the device of ``batch.host``.
        tempered: divide logits by the token column ``temperature`` (1.0 where absent); language models only.
        chunk: maximum number of tokens whose logits exist at once.
        head_fp32: compute the logits in fp32 under autocast too.
        part: set if a row is divided over ranks. ``hidden_NH`` then has only the rows of this part. Each rank computes
            the outputs of its rows and returns the outputs of all rows.
    """
    names = [head.name for head in heads]
    if len(set(names)) != len(names):
        raise TrainingError(f"two outputs of one call share a name: {names}")
    out: dict[str, Tensor] = {}
    for over, position in dict.fromkeys((h.over, h.position) for h in heads):
        group = [h for h in heads if (h.over, h.position) == (over, position)]
        # On the host: their number and values are read here, and reading them from a GPU would wait for its work.
        index_A = positions(batch.host, group[0])
        if position == "before" and bool((batch.host.position_N[index_A] == 0).any()):
            raise TrainingError(
                f"head {group[0].name!r} reads the position before each token, but the mask {over!r} covers the first "
                "token of a sequence, which has no position before it"
            )
        source_A = index_A - 1 if position == "before" else index_A
        if place_N is not None:
            source_A = place_N[source_A]
        rank_index_A, count = None, len(index_A)
        if part is not None:
            rank_index_A = part.among_own(source_A)
            index_A, source_A = index_A[rank_index_A], source_A[rank_index_A] - part.start
            rank_index_A = moved(rank_index_A, batch.ids_N.device)
        index_A, source_A = (moved(x, batch.ids_N.device) for x in (index_A, source_A))
        temperature_A = _temperature(batch, index_A) if tempered and position == "before" else None
        columns = {name: batch.tok[name][index_A] for h in group for name in h.columns}
        run = _Chunk(group, logits, head_fp32)
        arguments = (take_rows(hidden_NH, source_A), batch.ids_N[index_A], temperature_A)
        tokens = int(index_A.numel())
        is_one_chunk = tokens <= chunk or not run.reads_logits
        results = run(*arguments, columns) if is_one_chunk else _in_chunks(run, arguments, columns, tokens, chunk)
        if part is not None and rank_index_A is not None:
            results = [part.assemble(value, rank_index_A, count) for value in results]
        out.update(zip((h.name for h in group), results, strict=True))
    return {name: out[name] for name in names}


def is_tempered(batch: Batch) -> bool:
    """Whether a token was sampled at a temperature other than 1.0. Division by 1.0 would only take time and memory."""
    temperature_N = batch.host.tok.get("temperature")
    return temperature_N is not None and bool(((temperature_N > 0) & (temperature_N != 1)).any())


def _temperature(batch: Batch, index_A: Tensor) -> Tensor | None:
    """[A]: the temperature at which each token was sampled; 1.0 where the column is zero (the token was masked)."""
    if "temperature" not in batch.tok:
        return None
    temperature_A = batch.tok["temperature"][index_A]
    return torch.where(temperature_A > 0, temperature_A, torch.ones_like(temperature_A))


class _Chunk:
    """Computes all heads of a group on one chunk."""

    def __init__(self, heads: Sequence[Head], logits: Callable[[Tensor], Tensor], head_fp32: bool) -> None:
        self.heads, self.logits, self.head_fp32 = heads, logits, head_fp32
        readers = [head.fn for head in heads if head.reads == "logits"]
        self.reads_logits = bool(readers)
        # On a CPU log-probs are computed last, in the memory of the logits, if no other head keeps these for its
        # backward pass.
        further_heads = [fn for fn in readers if fn is not LOGPROBS.fn]
        self.overwrites = len(readers) == len(further_heads) + 1 and set(further_heads) <= {ENTROPY.fn, TOP1.fn}

    def __call__(
        self, hidden_CH: Tensor, ids_C: Tensor, temperature_C: Tensor | None, columns: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        inputs = {"hidden": hidden_CH.float()}
        if self.reads_logits:
            inputs["logits"] = self._logits(hidden_CH, temperature_C)
        overwrites = self.overwrites and hidden_CH.device.type == "cpu"
        with torch.autocast(hidden_CH.device.type, enabled=False):
            values = {}
            for head in sorted(self.heads, key=lambda head: head.fn is LOGPROBS.fn):
                of_head = {name: columns[name] for name in head.columns}
                if overwrites and head.fn is LOGPROBS.fn:
                    value = _OverwritingLogProbs.apply(inputs["logits"], ids_C)
                else:
                    value = head.fn(inputs[head.reads], ids_C, of_head, head.constants)
                if not isinstance(value, Tensor) or value.shape[:1] != ids_C.shape:
                    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                    raise TrainingError(f"head {head.name!r} must return [{ids_C.numel()}, ...], got {shape}")
                values[head.name] = value
        return tuple(values[head.name] for head in self.heads)

    def _logits(self, hidden_CH: Tensor, temperature_C: Tensor | None) -> Tensor:
        """fp32 [C, V], divided by the temperature."""
        if self.head_fp32:
            with torch.autocast(hidden_CH.device.type, enabled=False):
                logits_CV = self.logits(hidden_CH.float())
        else:
            logits_CV = self.logits(hidden_CH).float()
        return logits_CV if temperature_C is None else logits_CV / temperature_C[:, None]


class _OverwritingLogProbs(torch.autograd.Function):
    """[C]: the log-prob of each id. The memory of the logits then holds all log-probs, and in the backward pass the
    gradient of the logits."""

    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, ids_C: Tensor) -> Tensor:
        logp_CV = torch.ops.aten._log_softmax.out(logits_CV, 1, False, out=logits_CV)
        ctx.save_for_backward(logp_CV, ids_C)
        return logp_CV.gather(1, ids_C[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor, None]:
        """grad (1[v = id] - exp(logp_v))."""
        logp_CV, ids_C = ctx.saved_tensors
        grad_CV = logp_CV.exp_().mul_(-grad_C[:, None])
        return grad_CV.scatter_add_(1, ids_C[:, None], grad_C[:, None]), None


def _in_chunks(
    run: _Chunk,
    arguments: tuple[Tensor, Tensor, Tensor | None],
    columns: Mapping[str, Tensor],
    tokens: int,
    chunk: int,
) -> list[Tensor]:
    parts = []
    # Of equal size: products of a few rows are slow, and are rounded in another way than those of many rows.
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    for start in range(0, tokens, size):
        rows = slice(start, start + size)
        sliced: tuple[Any, ...] = (
            *(None if a is None else a[rows] for a in arguments),
            {k: v[rows] for k, v in columns.items()},
        )
        if torch.is_grad_enabled():
            # Heads draw no random numbers, and saving the generators' states takes time in every chunk.
            parts.append(checkpoint(run, *sliced, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(run(*sliced))
    return [torch.cat(values) for values in zip(*parts, strict=True)]


def scatter(batch: Batch, head: Head, values_A: Tensor) -> Tensor:
    """[A, ...] -> [N, ...], zero where masked; outputs per sequence stay [B, ...]."""
    if head.over == LAST_TOKEN:
        return values_A
    out_N = values_A.new_zeros((batch.tokens, *values_A.shape[1:]))
    out_N[batch.index(head.over)] = values_A
    return out_N


def head_of_role(
    output: str | Head, over: str | None, role: str, kind: str, borrowed: Mapping[str, OutputHead]
) -> Head:
    """The head of an output. The borrowed output heads that it uses are its constants.

    Args:
        over: the mask for the head; None: the head's own mask.
        role: the role's name.
        kind: the kind of the role's own head, ``lm`` | ``scalar`` | ``classes:N``.
        borrowed: {lending role: output head}.

    Raises TrainingError if the role's model does not have the output, or a head was not lent.
    """
    head = resolve_head(output, over)
    if isinstance(output, str) and not gives(kind, output):
        raise TrainingError(f"role {role!r} has a {kind!r} head, which does not give {output!r}")
    if not head.lenders:
        return head
    if absent := [lender for lender in head.lenders if lender not in borrowed]:
        raise TrainingError(
            f"head {head.name!r} uses the output head of {', '.join(absent)}, which was not lent to role {role!r}: the "
            "algorithm must declare it in Needs.loans"
        )
    return replace(head, constants={**head.constants, **{lender: borrowed[lender] for lender in head.lenders}})


def comparable_head(head: OutputHead, lender: str, rows: int, spec: ModelSpec, tokens: int) -> OutputHead:
    """A lent head, cut to the rows that the borrower's head also has. Models of one family may pad their vocabularies
    differently.

    Args:
        lender: the role that lends the head.
        rows: number of rows of the borrower's head.
        spec: the borrower.
        tokens: size of the borrower's tokenizer.

    Raises ModelError if either head has no row for some token.
    """
    common = min(rows, head.vocabulary)
    if rows != head.vocabulary and common < tokens:
        raise ModelError(
            f"role {lender!r} has logits for {head.vocabulary} tokens, but role {spec.role.name!r} ({spec.path!r}) has "
            f"logits for {rows}, with a tokenizer of {tokens} tokens. They cannot be compared: use a model with the "
            f"same tokenizer for {lender!r}."
        )
    return head.first(common)
