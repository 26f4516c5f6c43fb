"""Policy losses. The base class implements aggregation, train-inference correction, token selection, entropy and
metrics of drift. Each loss defines its surrogate."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from rlhf.errors import TrainingError
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.ops.batch import Batch
from rlhf.ops.losses import LossInput
from rlhf.types import Annotation, LossOutput, OnlineShape, Reduce
from torch import Tensor

from rlhf_algorithms.correction import CorrectionConfig, correction_weights
from rlhf_algorithms.kl import k3
from rlhf_algorithms.ratios import bounded, clipped_surrogate, token_ratio

Metrics = dict[str, tuple[Any, Tensor]]

UNCERTAINTY, PUSHES = "uncertainty", "pushes"
"""Token columns: the entropy right before the optimizer step, and 1 for tokens that ``top_entropy`` selects."""
EQUAL = 1e-5
"""In nats. Entropies that differ by less count as equal. Such differences arise if one distribution is computed in
different micro-batches. The first tokens of all samples of a prompt have the same distribution."""


class PolicyLossConfig(ComponentConfig):
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"] = "token_mean"
    """How the losses of tokens are averaged over the whole optimizer batch; ``seq_sum_constant`` divides their sum by
    the number of answers times ``max_length``."""
    max_length: int | None = Field(default=None, gt=0)
    """For ``seq_sum_constant`` only: the largest number of tokens of an answer (``sampling.max_new_tokens``, over all
    turns). A smaller value is refused; a larger one only scales the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Importance weights for samples whose log-probs differ between generator and trainer (precision, staleness)."""
    entropy_coef: float | None = None
    """Entropy bonus: absent = entropy is not computed, 0 = reported only."""
    top_entropy: float | None = Field(default=None, gt=0, lt=1)
    """Only this share of the optimizer batch's tokens, those with the highest entropy, enters the policy term (Wang et
    al. 2025, arXiv:2506.01939, there 0.2). Needs one more forward pass. Absent: all tokens."""
    stale_mask: float | None = Field(default=None, gt=0)
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, section 3.1): an answer with a negative advantage
    is masked if the mean over its tokens of (log-prob at sampling - log-prob now) exceeds this. Absent: no mask."""

    @model_validator(mode="after")
    def _constant(self) -> Self:
        if (self.aggregation == "seq_sum_constant") != (self.max_length is not None):
            raise ValueError(
                f"max_length = {self.max_length} with aggregation = {self.aggregation!r}: 'seq_sum_constant' needs "
                "max_length (the most tokens an answer may have); the other aggregations do not use it"
            )
        return self


class PolicyLoss(Loss):
    """A loss per token from ``logprobs`` and ``advantages``. Subclasses define :meth:`surrogate`.

    Terms: ``policy`` and, with a bonus, ``entropy``. Metrics: ``kl_old`` (policy now against the start of the update)
    and ``kl_generator`` (trainer against generator), both by k3 and >= 0; ``correction_weight``; ``entropy``;
    ``stale_masked``, the share of tokens that ``stale_mask`` leaves out.

    Tokens that a correction, ``top_entropy`` or ``stale_mask`` leaves out stay in the denominators. The entropy bonus
    and the KL terms cover all tokens.
    """

    Config: ClassVar[type[ComponentConfig]] = PolicyLossConfig
    data = "prompts"
    reads_old: ClassVar[bool] = True
    """Whether the surrogate reads ``old_logprobs``."""
    correction_option = "correction.preset tis"

    @property
    def generator_logprobs(self) -> bool:
        return self.config.correction.active

    @abstractmethod
    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        """(Loss value per token [A], a multiple of ``x["advantages"]``; metrics)."""

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",) if self.config.entropy_coef is None else ("logprobs", "entropy")

    def columns(self) -> tuple[str, ...]:
        c = self.config
        old = ("old_logprobs",) if self.reads_old or c.correction.active or c.stale_mask is not None else ()
        return ("advantages", *old, "gen_logprobs", *(() if c.top_entropy is None else (PUSHES,)))

    def signal(self) -> tuple[str, ...]:
        """The advantages. None if the loss computes an entropy, which covers all tokens, even if it is only
        reported."""
        return ("advantages",) if self.config.entropy_coef is None else ()

    def reduce(self) -> dict[str, Reduce]:
        c = self.config
        reduction = Reduce(c.aggregation, constant=float(c.max_length or 1))
        terms = {"policy": reduction}
        if c.entropy_coef:
            # Negative, because the bonus is maximised.
            terms["entropy"] = Reduce(c.aggregation, coef=-c.entropy_coef, constant=reduction.constant)
        return terms

    def conflicts(self, shape: OnlineShape) -> list[str]:
        limit, longest = self.config.max_length, shape.answer_tokens
        if limit is None or longest <= limit:
            return []
        return [
            f"algorithm.loss.max_length = {limit}, but an answer can have {longest} own tokens "
            f"(sampling.max_new_tokens, times the turns): the run would fail at the first longer answer. Set "
            f"--algorithm.loss.max_length {longest}."
        ]

    def prepass(self) -> tuple[Annotation, ...]:
        return () if self.config.top_entropy is None else (Annotation("policy", "entropy", UNCERTAINTY),)

    def prepare(self, batch: Batch) -> Batch:
        """Mark the tokens that ``top_entropy`` selects. Raises TrainingError for an answer longer than ``max_length``:
        the constant of ``seq_sum_constant`` would be too small for it."""
        limit = self.config.max_length
        if limit is not None:
            own_U = batch.tok["loss_mask"].new_zeros(batch.units, dtype=batch.unit_B.dtype)
            longest = int(own_U.index_add(0, batch.unit_N, batch.tok["loss_mask"].to(own_U.dtype)).max())
            if longest > limit:
                raise TrainingError(
                    f"an answer has {longest} own tokens, above algorithm.loss.max_length = {limit}; set it to the "
                    "most tokens an answer may have (sampling.max_new_tokens, times the turns)"
                )
        if self.config.top_entropy is not None:
            mask_N = batch.tok["loss_mask"]
            pushes_N = mask_N & (batch.column(UNCERTAINTY) >= top_threshold(batch, self.config.top_entropy))
            batch = batch.with_column("tok", PUSHES, pushes_N.float())
        return batch

    def __call__(self, x: LossInput) -> LossOutput:
        values_A, metrics = self.surrogate(x)
        if self.config.correction.active:
            weights_A = correction_weights(
                x["old_logprobs"], x["gen_logprobs"], x.sequence_A, x.sequences, self.config.correction
            )
            values_A = weights_A * values_A
            metrics["correction_weight"] = ("token", weights_A)
            metrics["correction_masked"] = ("token", (weights_A == 0).float())
        if self.config.stale_mask is not None:
            stale_A = self._stale(x, self.config.stale_mask)
            values_A = torch.where(stale_A, torch.zeros_like(values_A), values_A)
            metrics["stale_masked"] = ("token", stale_A.float())
        if self.config.top_entropy is not None:
            values_A = torch.where(x[PUSHES] > 0, values_A, torch.zeros_like(values_A))
        # k3(log p - log q) estimates KL(p || q) for tokens that p sampled, so the older policy is p.
        if x.has("old_logprobs"):
            metrics["kl_old"] = ("token", k3(x["old_logprobs"] - x["logprobs"].detach()))
        if x.has("gen_logprobs"):
            trainer_A = x["old_logprobs"] if x.has("old_logprobs") else x["logprobs"].detach()
            metrics["kl_generator"] = ("token", k3(x["gen_logprobs"] - trainer_A))
        terms = {"policy": values_A}
        if self.config.entropy_coef is not None:
            metrics["entropy"] = ("token", x["entropy"])
            if self.config.entropy_coef:
                terms["entropy"] = x["entropy"] * x.coef.get("entropy", 1.0)  # a factor that an update may carry
        return LossOutput(terms, metrics)

    @staticmethod
    def _stale(x: LossInput, limit: float) -> Tensor:
        """bool [A]: tokens with a negative advantage in answers whose mean log-prob fell by more than ``limit``.

        Deviations from the paper: (1) the sign is that of the token's own advantage; the paper has one per answer. (2)
        If the generator reports no log-probs, those of the start of the update are used.
        """
        sampled_A = x["gen_logprobs"] if x.has("gen_logprobs") else x["old_logprobs"]
        moved_S = x.mean_per_sequence(sampled_A.float() - x["logprobs"].detach().float())
        return (x["advantages"] < 0) & (x.to_tokens(moved_S) > limit)


def top_threshold(batch: Batch, share: float) -> float:
    """The lowest entropy among the ``share`` of the batch's trained tokens with the highest entropy: the 1 - share
    quantile of ``torch.quantile``, to compare with >=, minus :data:`EQUAL`. So tokens with equal entropy are selected
    together."""
    sorted_A = batch.column(UNCERTAINTY)[batch.tok["loss_mask"]].sort().values
    if not sorted_A.numel():
        return math.inf
    # Less 1e-9, because (1 - 0.7) * 10 is computed as 3.0000000000000004, whose ceiling is 4.
    return float(sorted_A[math.ceil((1 - share) * (sorted_A.numel() - 1) - 1e-9)]) - EQUAL


class PPOConfig(PolicyLossConfig):
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio's clip range is [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(default=0.2, ge=0)
    """Larger than clip_low: clip-higher."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bounds the loss of tokens with a negative advantage at this multiple of the advantage."""


class PPOLoss(PolicyLoss):
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) per token."""

    name = "ppo"
    source = "Schulman et al. 2017, Proximal policy optimization, arXiv:1707.06347"
    Config = PPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c, ratio_A = self.config, token_ratio(x["logprobs"], x["old_logprobs"])
        values_A, clipped_A = clipped_surrogate(ratio_A, x["advantages"], c.clip_low, c.clip_high, c.dual_clip)
        return values_A, {"clip_fraction": ("token", clipped_A.float()), "ratio": ("token", ratio_A)}


class ReinforceLoss(PolicyLoss):
    """-A log pi per token: the plain policy gradient. Unbiased for one optimizer step per rollout batch; later steps
    train on samples of an earlier policy without an importance ratio."""

    name = "reinforce"
    source = "Williams 1992, Simple statistical gradient-following algorithms"
    reads_old = False

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        return -x["advantages"] * x["logprobs"], {}


class GSPOConfig(PolicyLossConfig):
    aggregation: Literal["seq_mean_token_mean", "seq_mean_token_sum"] = "seq_mean_token_mean"
    """The mean over answers is part of the definition; ``seq_mean_token_sum`` weighs each by its length, which is LUSPO
    (arXiv:2602.05261)."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Clip of the sequence ratio. That ratio averages over tokens, so its clip is orders of magnitude below a
    token's."""
    clip_high: float = Field(default=4e-4, ge=0)
    """See clip_low."""


class GSPO(PolicyLoss):
    """The surrogate with one ratio per answer, s = exp(mean_t (lp - lp_old)), then the mean over answers.

    Deviations: (1) s multiplies each token's own advantage before the mean over tokens (the paper has one advantage
    per answer, where both are equal). (2) The mean log-ratio is bounded to +-20.
    """

    name = "gspo"
    source = "Zheng et al. 2025, Group sequence policy optimization, arXiv:2507.18071"
    Config = GSPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c = self.config
        ratio_S = bounded(x.mean_per_sequence(x["logprobs"].float() - x["old_logprobs"].float())).exp()
        values_A, clipped_A = clipped_surrogate(x.to_tokens(ratio_S), x["advantages"], c.clip_low, c.clip_high)
        return values_A, {"clip_fraction": ("token", clipped_A.float()), "ratio": ("sequence", ratio_S)}


class CISPOConfig(PolicyLossConfig):
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight's range is [1 - clip_low, 1 + clip_high]; 1 = no lower bound, as in the paper."""
    clip_high: float = Field(default=4.0, ge=0)
    """See clip_low."""

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.clip_low == 0 and self.clip_high == 0:
            raise ValueError("clip_low = clip_high = 0 makes every weight 1; use the loss 'reinforce' for that")
        return self


class CISPO(PolicyLoss):
    """-stop(clip(rho, 1 - low, 1 + high)) A log pi: clipping bounds the weight; clipped tokens keep a gradient."""

    name = "cispo"
    source = "MiniMax 2025, MiniMax-M1, arXiv:2506.13585"
    Config = CISPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c = self.config
        ratio_A = token_ratio(x["logprobs"].detach(), x["old_logprobs"])
        weight_A = ratio_A.clamp(1 - c.clip_low, 1 + c.clip_high)
        metrics: Metrics = {"clip_fraction": ("token", (weight_A != ratio_A).float()), "ratio": ("token", ratio_A)}
        return -weight_A * x["advantages"] * x["logprobs"], metrics


class SAPOConfig(PolicyLossConfig):
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"] = (
        "seq_mean_token_mean"
    )
    """As in the paper, the mean over an answer's tokens first."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Steepness of the gate for tokens with a positive advantage; larger values are closer to a clip."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same for all other tokens. Larger than ``tau_positive``, because their gradients also raise the probability
    of tokens that were not sampled."""


class SAPO(PolicyLoss):
    """-(4 / tau) s(tau (rho - 1)) A per token, s the logistic function: a soft gate in place of the clip. Its gradient
    equals the gradient of rho A at rho = 1 and fades on both sides; tau depends on the sign of A.

    Deviations: (1) A = 0 uses ``tau_negative``; its loss is 0 in any case. (2) The log-ratio is bounded to +-20, where
    the gate is closed.
    """

    name = "sapo"
    source = "Gao et al. 2025, Soft adaptive policy optimization, arXiv:2511.20347"
    Config = SAPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c, advantages_A = self.config, x["advantages"]
        ratio_A = token_ratio(x["logprobs"], x["old_logprobs"])
        tau_A = torch.where(advantages_A > 0, c.tau_positive, c.tau_negative)
        share_A = torch.sigmoid(tau_A * (ratio_A - 1))
        metrics: Metrics = {"gate": ("token", 4 * share_A * (1 - share_A)), "ratio": ("token", ratio_A)}
        return -4 / tau_A * share_A * advantages_A, metrics
