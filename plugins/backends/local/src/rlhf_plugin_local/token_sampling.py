"""Samples one token per row and computes its reported log-prob.

Definition, per row, with fp32 logits z over the vocabulary, temperature T > 0 and one uniform u in [0, 1):

1. ``z := z / T``. Without truncation the reported log-prob of token i is ``z_i - logsumexp(z)``, which a trainer's
   forward pass reproduces. With truncation the logsumexp is over the remaining tokens. This is the log-prob under the
   distribution that the token was drawn from, so an importance correction against the full distribution is correct.
2. Truncation is one threshold on z, the largest of three: top_k, the k-th largest z; top_p, the z of the last token of
   the smallest set of most likely tokens whose mass reaches top_p (masses renormalised after top_k); min_p, ``max(z) +
   log(min_p)``. Every token with ``z >= threshold`` stays, so tokens tied at the threshold all stay.
3. Inverse CDF in token order: the first token whose cumulated weight ``exp(z - max z)`` exceeds ``u x total weight``.
   Sums are double. Above :data:`BLOCK` tokens the CDF is computed in two levels (blocks, then tokens in the block).
   This is the same function of u, up to the rounding of the sums, and costs one pass over the vocabulary instead of a
   scan.

T = 0 is greedy: the first token of largest logit, with its log-prob under T = 1.

A row's draw depends on its own logits, parameters and u only. u for step t of a request is word t of a Philox stream
keyed by the request's 63-bit seed (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so it does
not depend on admission time or on other rows. (``torch.Generator`` on the CPU keeps the low 32 bits of a seed only.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from rlhf.types import Sampling
from torch import Tensor

BLOCK = 512
"""Vocabularies up to this size use a one-level CDF. It is also the block length of the two-level CDF."""
CACHED = 1 << 19
"""Number of logits that a CPU computes at once, in whole rows. They fit into the cache of a core. Larger temporaries
would be mapped again, page by page, in every step."""


class Uniforms:
    """The stream of one request: ``take(n)`` gives the next n uniforms in [0, 1), double, 53 bits each."""

    __slots__ = ("_bits",)

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)

    def take(self, n: int) -> Tensor:
        return torch.from_numpy((self._bits.random_raw(n) >> np.uint64(11)) * 2.0**-53)


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of B rows. ``temperature_B`` (fp32) is 1 for greedy rows; features that no row uses are None."""

    temperature_B: Tensor
    greedy_B: Tensor | None = None
    top_k_B: Tensor | None = None
    """int64; the vocabulary size if off."""
    top_p_B: Tensor | None = None
    """double; above 1 if off."""
    log_min_p_B: Tensor | None = None
    """fp32; -inf if off."""

    @staticmethod
    def of(samplings: Sequence[Sampling], vocabulary: int, device: torch.device | str = "cpu") -> Draw:
        def column(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [s.temperature == 0 for s in samplings]
        temperature = [s.temperature or 1.0 for s in samplings]
        # Greedy rows are not truncated, because the best token survives every truncation.
        top_k = [min(s.top_k, vocabulary) if s.top_k and s.temperature else vocabulary for s in samplings]
        top_p = [s.top_p if s.top_p < 1 and s.temperature else 2.0 for s in samplings]
        min_p = [math.log(s.min_p) if s.min_p and s.temperature else -math.inf for s in samplings]
        return Draw(
            column(temperature, torch.float32),
            column(greedy, torch.bool) if any(greedy) else None,
            column(top_k, torch.int64) if min(top_k) < vocabulary else None,
            column(top_p, torch.float64) if min(top_p) < 2 else None,
            column(min_p, torch.float32) if max(min_p) > -math.inf else None,
        )

    def split(self, rows: int) -> list[Draw]:
        """Split into the parameters of ``rows`` rows each."""
        count = -(-len(self.temperature_B) // rows)
        columns = (getattr(self, field.name) for field in fields(self))
        parts = [[None] * count if column is None else column.split(rows) for column in columns]
        return [Draw(*values) for values in zip(*parts, strict=True)]


def draw(logits_BV: Tensor, p: Draw, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row and its log-prob (int64 [B], fp32 [B]); the definition is at the top of this module.

    Args:
        logits_BV: any floating dtype; computed in fp32.
        uniform_B: double, in [0, 1).

    A row whose logits contain NaN or +inf, or are all -inf, gets a log-prob that is not finite.
    """
    rows = max(1, CACHED // logits_BV.shape[1])
    if logits_BV.device.type != "cpu" or len(logits_BV) <= rows:
        return _draw(logits_BV, p, uniform_B)
    parts = zip(logits_BV.split(rows), p.split(rows), uniform_B.split(rows), strict=True)
    tokens, logprobs = zip(*(_draw(*part) for part in parts), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(logits_BV: Tensor, p: Draw, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    z_BV = logits_BV.float() / p.temperature_B[:, None]
    top_B1 = z_BV.amax(-1, keepdim=True)
    weight_BV = (z_BV - top_B1).exp_()
    total_B = weight_BV.sum(-1)
    threshold_B1 = _threshold(z_BV, top_B1, p)
    if threshold_B1 is not None:
        weight_BV = weight_BV.masked_fill(z_BV < threshold_B1, 0.0)
        total_B = weight_BV.sum(-1)
    token_B = _inverse_cdf(weight_BV, uniform_B)
    if p.greedy_B is not None:
        token_B = torch.where(p.greedy_B, z_BV.argmax(-1), token_B)
    chosen_B = z_BV.gather(1, token_B[:, None])[:, 0]
    return token_B, chosen_B - top_B1[:, 0] - total_B.log()


def _threshold(z_BV: Tensor, top_B1: Tensor, p: Draw) -> Tensor | None:
    """The smallest z that stays, [B, 1]; None if no row is truncated."""
    threshold_B1 = None
    if p.log_min_p_B is not None:
        threshold_B1 = top_B1 + p.log_min_p_B[:, None]
    if p.top_k_B is not None or p.top_p_B is not None:
        V = z_BV.shape[1]
        # Only the k largest values are needed when every row has a top_k.
        k = V if p.top_k_B is None else int(p.top_k_B.max())
        sorted_BK = z_BV.sort(-1, descending=True).values if k == V else z_BV.topk(k, -1).values
        last_B = torch.full_like(sorted_BK[:, 0], k - 1, dtype=torch.int64)
        if p.top_k_B is not None:
            last_B = torch.minimum(last_B, p.top_k_B - 1)
        if p.top_p_B is not None:
            w_BK = (sorted_BK - top_B1).double().exp_()
            w_BK.masked_fill_(torch.arange(k, device=w_BK.device) > last_B[:, None], 0.0)
            cdf_BK = _cumulated(w_BK)
            reached_B = (cdf_BK < p.top_p_B[:, None] * cdf_BK[:, -1:]).sum(-1)
            last_B = torch.minimum(last_B, reached_B)
        kth_B1 = sorted_BK.gather(1, last_B[:, None])
        threshold_B1 = kth_B1 if threshold_B1 is None else torch.maximum(threshold_B1, kth_B1)
    # The most likely token always stays, even if rounding puts a threshold above it.
    return None if threshold_B1 is None else torch.minimum(threshold_B1, top_B1)


def _inverse_cdf(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """First token whose cumulated weight exceeds u x total, int64 [B]; never a token of weight 0."""
    V = weight_BV.shape[1]
    if V <= BLOCK:
        cdf_BV = _cumulated(weight_BV)
        return _first_above(cdf_BV, uniform_B * cdf_BV[:, -1])
    padded_BV = torch.nn.functional.pad(weight_BV, (0, -V % BLOCK))
    blocks_BKC = padded_BV.view(len(padded_BV), -1, BLOCK)
    cdf_BK = _cumulated(blocks_BKC.sum(-1))
    target_B = uniform_B * cdf_BK[:, -1]
    block_B = _first_above(cdf_BK, target_B)
    rows_B = torch.arange(len(block_B), device=block_B.device)
    before_B = torch.where(block_B > 0, cdf_BK[rows_B, (block_B - 1).clamp_min(0)], 0.0)
    cdf_BC = _cumulated(blocks_BKC[rows_B, block_B])
    return (block_B * BLOCK + _first_above(cdf_BC, target_B - before_B)).clamp_(max=V - 1)


def _cumulated(weight_BK: Tensor) -> Tensor:
    """Cumulative sums along a row, double [B, K]. On a GPU, torch sums a single row in an order that varies between
    calls, but several rows in a fixed order (``aten/src/ATen/native/cuda/ScanUtils.cuh``)."""
    if weight_BK.is_cuda and len(weight_BK) == 1:
        return weight_BK.expand(2, -1).cumsum(-1, dtype=torch.float64)[:1]
    return weight_BK.cumsum(-1, dtype=torch.float64)


def _first_above(cdf_BK: Tensor, target_B: Tensor) -> Tensor:
    """First index with ``cdf > target``. A target that rounding raised to the total counts as just below the total."""
    last_B = cdf_BK[:, -1]
    target_B = torch.minimum(target_B, torch.nextafter(last_B, torch.zeros_like(last_B)))
    # The clamps are for rows of NaN, which the caller detects by their log-prob.
    return torch.searchsorted(cdf_BK, target_B[:, None], right=True)[:, 0].clamp_(max=cdf_BK.shape[1] - 1)
