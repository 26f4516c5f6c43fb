"""Importance correction for the numerical mismatch of generator and trainer: w = exp(lp_old - lp_gen), a detached
weight.

Level x mode x statistic x band. The statistic measures a token: its ratio w, or how far the two probabilities of the
sampled token are apart, p = exp(lp_gen) of the generator and o = exp(lp_old) of the trainer, both within
[1e-6, 1 - 1e-6]:

==================  =====================================================================
``ratio``           w
``binary_kl``       KL(p, o) = p log(p / o) + (1 - p) log((1 - p) / (1 - o))
``binary_kl_both``  max(KL(p, o), KL(o, p))
``tv``              abs(p - o)
==================  =====================================================================

The level chooses whose statistic counts: the token's, the mean over the tokens of its sequence (the geometric mean of
ratios), or the product of ratios over the sequence. The mode says what happens outside the band [low, high]:
``truncate`` moves the ratio to the nearer end, ``mask`` makes the weight 0. Inside the band the weight is the ratio at
its level; with another statistic it is the ratio of each token. Losses multiply by the weight. The denominators of
their means do not change, so masking a token does not increase the weight of the others.

===================  =====================  ==============  =========  ================================================
preset               level, mode            statistic       band       source
===================  =====================  ==============  =========  ================================================
``tis``              token, truncate        ratio           [0.5, 5]   Yao et al. 2025, "Your efficient RL framework
                                                                       secretly brings you off-policy RL training"
``icepop``           token, mask            ratio           [0.5, 5]   Ling team 2025, arXiv:2510.18855
``seq_mask_tis``     sequence mean, mask;   ratio           [0.5, 5]   OpenRLHF's ``seq-mask-tis``
                     then token, truncate
``mis``              sequence product,      ratio           [0, 3]     Liu et al. 2025, "When speed kills stability"; 3
                     mask                                              is the default of TRL's ``sequence_mask``
``kpop``             token, mask            binary_kl_both  [0, 2]     AReaL 2026, KPop
``flash_reinforce``  sequence mean, mask    binary_kl       [0, 5e-3]  FlashREINFORCE 2026, in OpenRLHF 0.11.2
===================  =====================  ==============  =========  ================================================

The trust regions of DPPO compare the generator with the policy of now; they are the loss ``dppo``.

Deviations:

1. ``tis``: the paper truncates from above only, w = min(ratio, C). Our band is OpenRLHF's, which also lifts weights
   below 0.5 to 0.5. ``low = 0`` gives the paper's form.
2. ``icepop``: none; the band is the paper's.
3. ``seq_mask_tis``: OpenRLHF masks sequences and leaves their token weights unbounded. Here they are truncated to the
   same band, so that every weight is 0 or within [low, high].
4. ``mis``: none in the form, w = ratio where ratio <= C, else 0. TRL takes C = 3; verl's preset of this name rejects
   below 0.5 and above 2, which ``low = 0.5`` and ``high = 2`` give. A product over many tokens leaves a two-sided band
   by ordinary rounding differences, and many sequences with it.
5. All: log-ratios are bounded to +-20 before exp; a log-ratio that is not a number weighs 0. A level and a mode
   without a preset have the band [0.5, 5] of the ratio; for another statistic ``high`` must be set.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig
from torch import Tensor

from rlhf_algorithms.ratios import LOG_RATIO_BOUND

Level = Literal["token", "sequence_mean", "sequence_product"]
Mode = Literal["truncate", "mask"]
Statistic = Literal["ratio", "binary_kl", "binary_kl_both", "tv"]


class Scheme(NamedTuple):
    """A level, a mode and a statistic, with the default band."""

    level: Level
    mode: Mode
    statistic: Statistic = "ratio"
    low: float = 0.5
    high: float = 5.0


PRESETS: dict[str, Scheme] = {
    "tis": Scheme("token", "truncate"),
    "icepop": Scheme("token", "mask"),
    "seq_mask_tis": Scheme("token", "truncate"),  # after the mask on the sequence mean
    "mis": Scheme("sequence_product", "mask", low=0.0, high=3.0),
    "kpop": Scheme("token", "mask", "binary_kl_both", 0.0, 2.0),
    "flash_reinforce": Scheme("sequence_mean", "mask", "binary_kl", 0.0, 5e-3),
}


class CorrectionConfig(ComponentConfig):
    """Train-inference correction: off, a preset, or a level, a mode and a statistic."""

    preset: Literal["tis", "icepop", "seq_mask_tis", "mis", "kpop", "flash_reinforce"] | None = None
    """A published scheme; do not set ``level``, ``mode`` and ``statistic`` with it."""
    level: Level | None = None
    """Level of the statistic: the token's, the mean over the sequence (geometric for ratios), or the product."""
    mode: Mode | None = None
    """Outside the band: move the ratio to the nearer end (``truncate``) or make the weight 0 (``mask``)."""
    statistic: Statistic = "ratio"
    """``ratio`` of the token's probabilities, their ``binary_kl`` (of the generator's against the trainer's), the
    larger of both directions (``binary_kl_both``), or their difference (``tv``)."""
    low: float = Field(default=0.5, ge=0)
    """Lower end of the band; 0 with preset ``mis`` and with other statistics than the ratio."""
    high: float = Field(default=5.0, gt=0)
    """Upper end of the band; 3 with preset ``mis``, 2 with ``kpop``, 5e-3 with ``flash_reinforce``."""

    @model_validator(mode="before")
    @classmethod
    def _band(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        scheme = PRESETS.get(str(data.get("preset")))
        if scheme is not None:
            # As if the user had set them: _check_divergence requires that `high` is set.
            return {"low": scheme.low, "high": scheme.high, **data}
        return data if data.get("statistic", "ratio") == "ratio" else {"low": 0.0, **data}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        c = self.scheme
        if self.preset is not None and (self.level is not None or self.mode is not None or self.statistic != "ratio"):
            raise ValueError(
                f"preset {self.preset!r} already sets level, mode and statistic; set either preset or these three"
            )
        if (self.level is None) != (self.mode is None):
            raise ValueError(f"level = {self.level!r} and mode = {self.mode!r}: a correction needs both, or a preset")
        if not self.active and (self.low, self.high, self.statistic) != (0.5, 5.0, "ratio"):
            raise ValueError(
                "a band or a statistic is set, but no correction is enabled; set preset, or level and mode"
            )
        if c.statistic != "ratio":
            self._check_divergence(c)
        if self.low >= self.high:
            raise ValueError(f"the band needs low < high, got [{self.low}, {self.high}]")
        return self

    def _check_divergence(self, c: Scheme) -> None:
        """Raises ValueError for a level, mode or band that only ratios have."""
        if c.mode != "mask" or c.level == "sequence_product":
            raise ValueError(
                f"statistic = {c.statistic!r} with level = {c.level!r} and mode = {c.mode!r}: a divergence is not a "
                "weight, so it cannot be used for truncation and has no product; use mode = 'mask' with level = "
                "'token' or 'sequence_mean'"
            )
        if self.low != 0:
            raise ValueError(f"low = {self.low}: a divergence has only an upper bound; remove low")
        if "high" not in self.model_fields_set:
            raise ValueError(f"statistic = {c.statistic!r} needs high, the largest divergence that is trained on")
        if c.statistic == "tv" and self.high >= 1:
            raise ValueError(f"high = {self.high}: two probabilities differ by less than 1, so nothing would be masked")

    @property
    def active(self) -> bool:
        return self.preset is not None or self.level is not None

    @property
    def scheme(self) -> Scheme:
        """The scheme of the preset, or of the fields."""
        if self.preset is not None:
            return PRESETS[self.preset]
        return Scheme(self.level or "token", self.mode or "truncate", self.statistic)


def correction_weights(
    old_logprobs_A: Tensor, gen_logprobs_A: Tensor, sequence_A: Tensor, sequences: int, config: CorrectionConfig
) -> Tensor:
    """The weight of each token: float32 [A], detached, finite; with the ratio as statistic 0 or within [low, high].

    Args:
        old_logprobs_A: log-probs of the trainer at the start of the update.
        gen_logprobs_A: log-probs that the generator reported.
        sequence_A: int64, the index of each token's sequence, one of ``sequences``.
    """
    old_A, gen_A = old_logprobs_A.detach().float(), gen_logprobs_A.float()
    log_A = (old_A - gen_A).double()
    unknown_A = log_A.isnan()
    log_A = torch.where(unknown_A, torch.zeros_like(log_A), log_A.clamp(-1e6, 1e6))  # sums stay finite
    level, mode, statistic, *_ = config.scheme
    if statistic == "ratio":
        weights_A = _weights(_at_level(log_A, level, sequence_A, sequences), mode, config)
        if config.preset == "seq_mask_tis":
            # The sequence passes if its mean is inside the band, and then keeps the weights of its tokens.
            mean_A = _at_level(log_A, "sequence_mean", sequence_A, sequences)
            weights_A = torch.where(_weights(mean_A, "mask", config) > 0, weights_A, 0.0)
    else:
        apart_A = torch.where(unknown_A, 0.0, divergence(gen_A.double(), old_A.double(), statistic))
        inside_A = _at_level(apart_A, level, sequence_A, sequences) <= config.high
        weights_A = torch.where(inside_A, log_A.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), 0.0)
    return torch.where(unknown_A, 0.0, weights_A).float()


def divergence(from_logprobs_A: Tensor, to_logprobs_A: Tensor, statistic: Statistic) -> Tensor:
    """Distance between the two probabilities of a sampled token, [A], >= 0. Each probability defines a Bernoulli
    distribution: "this token" or "another token". Probabilities are kept within [1e-6, 1 - 1e-6]."""
    p_A, o_A = (logprobs_A.exp().clamp(1e-6, 1 - 1e-6) for logprobs_A in (from_logprobs_A, to_logprobs_A))
    if statistic == "tv":
        return (p_A - o_A).abs()
    if statistic == "binary_kl_both":
        return torch.maximum(_binary_kl(p_A, o_A), _binary_kl(o_A, p_A))
    return _binary_kl(p_A, o_A)


def _binary_kl(p_A: Tensor, o_A: Tensor) -> Tensor:
    return p_A * (p_A / o_A).log() + (1 - p_A) * ((1 - p_A) / (1 - o_A)).log()


def _at_level(log_A: Tensor, level: Level, sequence_A: Tensor, sequences: int) -> Tensor:
    if level == "token":
        return log_A
    sum_S = log_A.new_zeros(sequences).index_add(0, sequence_A, log_A)
    if level == "sequence_mean":
        count_S = log_A.new_zeros(sequences).index_add(0, sequence_A, torch.ones_like(log_A))
        sum_S = sum_S / count_S.clamp(min=1)
    return sum_S[sequence_A]


def _weights(log_A: Tensor, mode: Mode, config: CorrectionConfig) -> Tensor:
    w = log_A.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    if mode == "truncate":
        return w.clamp(config.low, config.high)
    return torch.where((w >= config.low) & (w <= config.high), w, torch.zeros_like(w))
