"""Attention of packed sequences by ``scaled_dot_product_attention``: one call per run of sequences with equal shapes.

Shape suffixes: N tokens (those of ``q``, ``k``, ``v``), L of them in these sequences, G sequences of a run, T tokens of
a sequence, Q <= T queries, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rlhf.ops.spans import moved
from torch import Tensor
from torch.nn import functional as F

from rlhf_modeling.shared_prefixes import Stretch, take_rows

MASKED = 0.65
"""If a sequence's own tokens are a smaller share than this, masked attention of only these tokens is faster than causal
attention of all tokens, which skips half of the work (measured: a CPU, 300 to 1000 tokens). On a GPU a mask excludes
the fast kernels, so all tokens are computed there."""


@dataclass(frozen=True, slots=True)
class Options:
    scaling: float
    dropout: float
    window: int | None
    softcap: float | None


@dataclass(frozen=True, slots=True)
class SequenceRun:
    """Neighbouring sequences with the same length and the same length of the prefix."""

    count: int
    length: int
    skip: int
    """Tokens of the shared prefix, which are computed with another sequence."""
    first: int
    """Position of the first query: ``skip``, or 0 if queries of the prefix are also computed, and dropped."""


@dataclass(frozen=True, slots=True)
class SequenceRuns:
    """All long sequences of a packed row."""

    runs: tuple[SequenceRun, ...]
    queries: Tensor | None
    """int64: the tokens whose queries are used, run after run; None: all N in order."""
    keys: Tensor | None
    """The same for keys and values."""
    own_L: Tensor
    """int64: the tokens that the result belongs to."""
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)


def collect(stretches: Sequence[Stretch], tokens: int, place: Tensor | None, device: torch.device) -> SequenceRuns:
    """Runs of these sequences. Same arguments as :func:`rlhf_modeling.matmul_attention.lay_out`."""
    every_N = torch.arange(tokens, device=None if place is None else place.device)
    runs: list[list[Stretch]] = []
    for s in stretches:
        if runs and (runs[-1][0].length, runs[-1][0].skip) == (s.length, s.skip):
            runs[-1].append(s)
        else:
            runs.append([s])
    groups, queries, keys = [], [], []
    for run in runs:
        length, skip = run[0].length, run[0].skip
        first = skip if device.type == "cpu" and length - skip < MASKED * length else 0
        groups.append(SequenceRun(len(run), length, skip, first))
        for s in run:
            index_T = every_N[s.first : s.first + length] if place is None else place[s.first : s.first + length]
            keys.append(index_T)
            queries.append(index_T[first:])
    own_L = torch.cat([every_N[s.start : s.start + s.length - s.skip] for s in stretches])
    q_rows, k_rows = (
        None if torch.equal(every_N, x) else moved(x, device) for x in (torch.cat(queries), torch.cat(keys))
    )
    return SequenceRuns(tuple(groups), q_rows, k_rows, moved(own_L, device))


def sdpa_attention(q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, layout: SequenceRuns, options: Options) -> Tensor:
    """[N, H, D] -> [L, H, D] at ``layout.own_L``."""
    q_sizes = [r.count * (r.length - r.first) for r in layout.runs]
    k_sizes = [r.count * r.length for r in layout.runs]
    parts = []
    for run, *rows in zip(
        layout.runs,
        _take(q_NHD, layout.queries).split(q_sizes),
        _take(k_NKD, layout.keys).split(k_sizes),
        _take(v_NKD, layout.keys).split(k_sizes),
        strict=True,
    ):
        q, k, v = (x.unflatten(0, (run.count, -1)).transpose(1, 2) for x in rows)
        out = _attend(q, k, v, layout, options).transpose(1, 2)
        parts.append(out[:, run.skip - run.first :].flatten(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else take_rows(x, index)


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: SequenceRuns, options: Options) -> Tensor:
    """[G, H, Q, D]; the queries are the last ones of the sequences, k and v [G, K, T, D]."""
    queries, length = q.shape[2], k.shape[2]
    window = options.window if options.window is not None and options.window < length else None
    if options.softcap is not None:
        return _softcapped(q, k, v, options, _band(layout, length, window, q))
    causal = window is None and queries == length
    if q.is_cuda and (not causal or q.dtype == torch.float32):
        # There, torch's kernel without T x T scores does not accept groups (up to torch 2.13); it would fall back to
        # the plain one.
        k, v = _repeated(q, k, v)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if causal else _band(layout, length, window, q),
        is_causal=causal,
        dropout_p=options.dropout,
        scale=options.scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _softcapped(q: Tensor, k: Tensor, v: Tensor, options: Options, seen_QT: Tensor) -> Tensor:
    """``softcap * tanh(scores / softcap)`` before the softmax (Gemma 2), which sdpa cannot express."""
    cap = options.softcap
    assert cap is not None
    k, v = _repeated(q, k, v)
    scores = cap * torch.tanh(q @ k.transpose(2, 3) * (options.scaling / cap))
    scores = scores.masked_fill(~seen_QT, float("-inf"))
    return F.dropout(scores.softmax(-1), options.dropout) @ v


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [G, H, T, D]: each is repeated for all query heads of its group."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _band(layout: SequenceRuns, length: int, window: int | None, q: Tensor) -> Tensor:
    """bool [Q, T]: token i sees j if i - window < j <= i."""
    key = (length, window or length)
    if key not in layout.masks:
        i = torch.arange(length, device=q.device)
        distance = i[:, None] - i[None, :]
        layout.masks[key] = (distance >= 0) & (distance < key[1])
    return layout.masks[key][length - q.shape[2] :]
