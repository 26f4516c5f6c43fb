"""Importance correction for the numerical mismatch of generator and trainer: w = exp(lp_old - lp_gen), a detached
weight.

Level x mode x band. The level chooses the ratio: of a token, of a sequence as the geometric mean over its tokens, or of
a sequence as the product. The mode says what happens outside the band [low, high]: ``truncate`` moves the weight to the
nearer end, ``mask`` makes it 0. Losses multiply by the weight. The denominators of their means do not change, so
masking a token does not increase the weight of the others.

================  =========================  ===============  ==================================================
preset            level, mode                band             source
================  =========================  ===============  ==================================================
``tis``           token, truncate            [0.5, 5]         Yao et al. 2025, "Your efficient RL framework
                                                              secretly brings you off-policy RL training"
``icepop``        token, mask                [0.5, 5]         Ling team 2025, arXiv:2510.18855
``seq_mask_tis``  sequence mean, mask; then  [0.5, 5]         OpenRLHF's ``seq-mask-tis``
                  token, truncate
``mis``           sequence product, mask     [0, 3]           Liu et al. 2025, "When speed kills stability"; C is
                                                              the default of TRL's ``sequence_mask``
================  =========================  ===============  ==================================================

Deviations:

1. ``tis``: the paper truncates from above only, w = min(ratio, C). Our band is OpenRLHF's, which also lifts weights
   below 0.5 to 0.5. ``low = 0`` gives the paper's form.
2. ``icepop``: none; the band is the paper's.
3. ``seq_mask_tis``: OpenRLHF masks sequences and leaves their token weights unbounded. Here they are truncated to the
   same band, so that every weight of every preset is 0 or within [low, high].
4. ``mis``: none in the form, w = ratio where ratio <= C, else 0. TRL takes C = 3; verl's preset of this name rejects
   below 0.5 and above 2, which ``low = 0.5`` and ``high = 2`` give. A product over many tokens leaves a two-sided band
   by ordinary rounding differences, and many sequences with it.
5. All: log-ratios are bounded to +-20 before exp; a log-ratio that is not a number weighs 0. A level and a mode
   without a preset have the band [0.5, 5].
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig
from torch import Tensor

from rlhf_algorithms.ratios import LOG_RATIO_BOUND

Level = Literal["token", "sequence_mean", "sequence_product"]
Mode = Literal["truncate", "mask"]

PRESETS: dict[str, tuple[Level, Mode]] = {
    "tis": ("token", "truncate"),
    "icepop": ("token", "mask"),
    "seq_mask_tis": ("token", "truncate"),  # after the mask on the sequence mean
    "mis": ("sequence_product", "mask"),
}
ONE_SIDED = {"low": 0.0, "high": 3.0}
"""Default band of ``mis``."""


class CorrectionConfig(ComponentConfig):
    """Train-inference correction: off, a preset, or a level and a mode."""

    preset: Literal["tis", "icepop", "seq_mask_tis", "mis"] | None = None
    """A published combination of level and mode; do not set ``level`` and ``mode`` with it."""
    level: Level | None = None
    """The ratio that is used: of the token, geometric mean of the sequence, or product over the sequence."""
    mode: Mode | None = None
    """Outside the band: move the weight to the nearer end (``truncate``) or make it 0 (``mask``)."""
    low: float = Field(default=0.5, ge=0)
    """Lower end of the band of weights; 0 with preset ``mis``."""
    high: float = Field(default=5.0, gt=0)
    """Upper end of the band of weights; 3 with preset ``mis``."""

    @model_validator(mode="before")
    @classmethod
    def _band(cls, data: Any) -> Any:
        return {**ONE_SIDED, **data} if isinstance(data, dict) and data.get("preset") == "mis" else data

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.preset is not None and (self.level is not None or self.mode is not None):
            raise ValueError(f"preset {self.preset!r} already says level and mode; give either it or those two")
        if (self.level is None) != (self.mode is None):
            raise ValueError(f"level = {self.level!r} and mode = {self.mode!r}: a correction needs both, or a preset")
        if not self.active and (self.low, self.high) != (0.5, 5.0):
            raise ValueError("a band [low, high] is given but no correction is on; give a preset, or level and mode")
        if self.low >= self.high:
            raise ValueError(f"the band needs low < high, got [{self.low}, {self.high}]")
        return self

    @property
    def active(self) -> bool:
        return self.preset is not None or self.level is not None


def correction_weights(
    old_logprobs_A: Tensor, gen_logprobs_A: Tensor, sequence_A: Tensor, sequences: int, config: CorrectionConfig
) -> Tensor:
    """The weight of each token: float32 [A], detached, finite, 0 or within [low, high].

    Args:
        old_logprobs_A: by the trainer at the start of the update.
        gen_logprobs_A: as the generator reported them.
        sequence_A: int64, which of the ``sequences`` sequences each token belongs to.
    """
    log_A = (old_logprobs_A.detach().float() - gen_logprobs_A.float()).double()
    unknown_A = log_A.isnan()
    log_A = torch.where(unknown_A, torch.zeros_like(log_A), log_A.clamp(-1e6, 1e6))  # sums stay finite
    level, mode = PRESETS[config.preset] if config.preset else (config.level or "token", config.mode or "truncate")
    weights_A = _weights(_at_level(log_A, level, sequence_A, sequences), mode, config)
    if config.preset == "seq_mask_tis":
        mean_A = _at_level(log_A, "sequence_mean", sequence_A, sequences)
        weights_A = torch.where(_weights(mean_A, "mask", config) > 0, weights_A, torch.zeros_like(weights_A))
    return torch.where(unknown_A, torch.zeros_like(weights_A), weights_A).float()


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
