"""Policy losses that bound how far an update moves the policy without clipping each token's ratio. They use the change
of probability (DPPO), a smooth gate on the answer's weight (VESPO), one clipped geometric mean (GMPO), or a special
treatment of the few tokens that lower the entropy most (Clip-Cov, KL-Cov).

Notation: p, o and q are the probabilities of a sampled token when it was sampled, at the start of the update, and now.
A is its advantage.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from rlhf.ops.batch import Batch
from rlhf.ops.losses import LossInput
from rlhf.types import Annotation
from torch import Tensor

from rlhf_algorithms.correction import divergence
from rlhf_algorithms.policy_losses import Metrics, PolicyLoss, PolicyLossConfig, PPOConfig, PPOLoss
from rlhf_algorithms.ratios import LOG_RATIO_BOUND, bounded, token_ratio

LIVE_LOGPROBS, SELECTED = "live_logprobs", "covariance_selected"
"""Token columns: log-probs right before the optimizer step, and 1 for tokens that the covariance selects."""


class AgainstGenerator(PolicyLoss):
    """A loss whose ratio compares with the generator's policy, so it corrects for the generator by itself."""

    @property
    def generator_logprobs(self) -> bool:
        return True


class AgainstGeneratorConfig(PolicyLossConfig):
    @model_validator(mode="after")
    def _uncorrected(self) -> Self:
        if self.correction.active:
            raise ValueError(
                "correction weights by the ratio of trainer and generator, which this loss already includes in its own "
                "ratio; remove correction"
            )
        return self


class DPPOConfig(AgainstGeneratorConfig):
    divergence: Literal["tv", "binary_kl"] = "tv"
    """What is bounded: ``tv``, the change q - p of the token's probability, or ``binary_kl``, KL(p, q)."""
    low: float | None = Field(default=None, gt=0)
    """Bound for tokens that a negative advantage pushes down. Default: 0.2 for ``tv``, 0.05 for ``binary_kl``."""
    high: float | None = Field(default=None, gt=0)
    """Bound for tokens that a positive advantage pushes up. Default: the same."""
    weight_max: float = Field(default=20.0, gt=0)
    """Upper bound of the weight q / p."""

    def bounds(self) -> tuple[float, float]:
        default = 0.2 if self.divergence == "tv" else 0.05
        return self.low or default, self.high or default


class DPPO(AgainstGenerator):
    """-stop(min(q / p, weight_max)) A log q. A token is left out if it has already moved by more than the bound in the
    direction of A.

    A mask on probabilities does not restrict rare tokens, whose ratios can leave a clip range by rounding alone. It
    restricts frequent tokens, whose ratios hardly change. Metrics: ``clip_fraction``, the share of tokens that are left
    out, and ``ratio``.

    Deviations: (1) ``weight_max`` is 20, as in verl's code; verl's YAML has 3. (2) The bound is 0.2 for ``tv``
    (prime-rl, SkyRL; verl 0.15) and 0.05 for ``binary_kl`` (verl). (3) log(q / p) is bounded to +-20.
    """

    name = "dppo"
    source = "DPPO 2026, arXiv:2602.04879"
    Config = DPPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c, advantages_A = self.config, x["advantages"]
        sampled_A, now_A = x["gen_logprobs"].float(), x["logprobs"].detach().float()
        up_A = now_A > sampled_A
        far_A = divergence(sampled_A, now_A, c.divergence)
        low, high = c.bounds()
        out_A = ((advantages_A > 0) & up_A & (far_A > high)) | ((advantages_A < 0) & ~up_A & (far_A > low))
        ratio_A = token_ratio(now_A, sampled_A)
        values_A = -ratio_A.clamp(max=c.weight_max) * advantages_A * x["logprobs"]
        metrics: Metrics = {"clip_fraction": ("token", out_A.float()), "ratio": ("token", ratio_A)}
        return torch.where(out_A, torch.zeros_like(values_A), values_A), metrics


class VESPOConfig(AgainstGeneratorConfig):
    k_positive: float = Field(default=2.0, ge=0)
    """k of answers with an advantage of at least 0: a larger one closes the gate earlier below weight 1."""
    lambda_positive: float = Field(default=3.0, gt=0)
    """lambda of such answers: a larger one closes the gate earlier above weight 1."""
    k_negative: float = Field(default=3.0, ge=0)
    """k of answers with a negative advantage."""
    lambda_negative: float = Field(default=2.0, gt=0)
    """lambda of answers with a negative advantage."""


class VESPO(AgainstGenerator):
    """-stop(phi(w)) A log q, with phi(w) = w^k exp(lambda (1 - w)) and w the product of q / p over the answer's tokens.

    phi(1) = 1. k and lambda depend on the sign of A. Metric: ``gate``, the mean of phi.

    Deviations: (1) The sign of each token's own advantage is used; the paper has one advantage per answer. (2) As in
    TRL 1.16, log w is kept within [log 1e-8, 20], each log-ratio within +-20. (3) p is always the generator's
    probability; TRL without a correction for vLLM uses the policy at the start of the update.
    """

    name = "vespo"
    source = "VESPO 2026, arXiv:2602.10693; the form of TRL 1.16"
    Config = VESPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c, advantages_A = self.config, x["advantages"]
        log_A = (x["logprobs"].detach().float() - x["gen_logprobs"].float()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        log_w_A = x.to_tokens(x.sum_per_sequence(log_A).clamp(math.log(1e-8), LOG_RATIO_BOUND))
        rises_A = advantages_A >= 0
        k_A = torch.where(rises_A, c.k_positive, c.k_negative)
        lambda_A = torch.where(rises_A, c.lambda_positive, c.lambda_negative)
        gate_A = (k_A * log_w_A + lambda_A * (1 - log_w_A.exp())).exp()
        return -gate_A * advantages_A * x["logprobs"], {"gate": ("token", gate_A)}


class GMPOConfig(PolicyLossConfig):
    aggregation: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"
    """The mean over answers is part of the definition."""
    clip_low: float = Field(default=0.4, gt=0)
    """In nats: the log-ratio of a token that a negative advantage pushes down counts for no less than -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """In nats: the log-ratio of a token that a positive advantage pushes up counts for no more than clip_high."""


class GMPO(PolicyLoss):
    """-A s, then the mean over answers; s is the geometric mean of the clipped ratios q / o of the answer's tokens.
    Each ratio is clipped in log space, on the side to which A pushes it.

    Deviations: (1) s multiplies each token's own advantage, whose sign chooses the side of the clip; the paper has one
    advantage per answer. A = 0 clips nothing. (2) The mean log-ratio is bounded to +-20.
    """

    name = "gmpo"
    source = "Zhao et al. 2025, Geometric-mean policy optimization, arXiv:2507.20673"
    Config = GMPOConfig

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        c, advantages_A = self.config, x["advantages"]
        log_A = x["logprobs"].float() - x["old_logprobs"].float()
        upper_A = torch.where(advantages_A > 0, c.clip_high, math.inf)
        lower_A = torch.where(advantages_A < 0, -c.clip_low, -math.inf)
        clipped_A = ((log_A > upper_A) | (log_A < lower_A)).float()
        ratio_S = bounded(x.mean_per_sequence(torch.minimum(torch.maximum(log_A, lower_A), upper_A))).exp()
        metrics: Metrics = {"clip_fraction": ("token", clipped_A), "ratio": ("sequence", ratio_S)}
        return -x.to_tokens(ratio_S) * advantages_A, metrics


class CovarianceConfig(PPOConfig):
    treatment: Literal["clip", "kl"] = "clip"
    """``clip``: selected tokens have no gradient. ``kl``: their loss is -ratio A + kl_coef abs(log ratio), and no
    token's ratio is clipped."""
    share: float = Field(default=2e-4, gt=0, lt=1)
    """Share of the optimizer batch's tokens that is selected, rounded up."""
    low: float = 1.0
    """``clip`` only: tokens are selected at random among those whose covariance is within [low, high]."""
    high: float = 5.0
    """``clip`` only: see ``low``."""
    kl_coef: float = Field(default=1.0, gt=0)
    """``kl`` only: the coefficient of the penalty."""

    @model_validator(mode="after")
    def _one_treatment(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low = {self.low} must be below high = {self.high}")
        options = ("kl_coef",) if self.treatment == "clip" else ("low", "high", "clip_low", "clip_high", "dual_clip")
        idle = [name for name in options if getattr(self, name) != type(self).model_fields[name].default]
        if idle:
            raise ValueError(
                f"treatment = {self.treatment!r} does not use all options that are set; remove {' and '.join(idle)}"
            )
        return self


class Covariance(PPOLoss):
    """PPO's loss with another treatment of the few tokens whose covariance (log q - mean)(A - mean) is high. These are
    likely tokens that are pushed up and unlikely tokens that are pushed down; they lower the entropy most.

    Means are over the optimizer batch. ``clip`` (Clip-Cov) draws the tokens at random from a range of covariances.
    ``kl`` (KL-Cov) takes the tokens with the highest covariances; its penalty acts only after the first of several
    optimizer steps. Needs one more forward pass. Metric: ``selected``, the share of selected tokens.

    Deviations: (1) The penalty of KL-Cov is abs(log ratio), as in the authors' code; the paper writes a KL. (2) Means
    and shares are over the whole optimizer batch; verl computes them per micro-batch. (3) Clip-Cov draws with
    :func:`draws`, so the draw does not depend on how the batch is split, and a resumed run draws the same. (4) The draw
    includes tokens whose ratio is clipped, which have no gradient; the authors' code and verl leave those out.
    """

    name = "covariance"
    source = "Cui et al. 2025, The entropy mechanism of reinforcement learning for reasoning, arXiv:2505.22617"
    Config = CovarianceConfig

    def columns(self) -> tuple[str, ...]:
        return (*super().columns(), SELECTED)

    def signal(self) -> tuple[str, ...]:
        return super().signal() if self.config.treatment == "clip" else ()  # the penalty covers all selected tokens

    def prepass(self) -> tuple[Annotation, ...]:
        return (*super().prepass(), Annotation("policy", "logprobs", LIVE_LOGPROBS))

    def prepare(self, batch: Batch) -> Batch:
        batch = super().prepare(batch)
        mask_N = batch.tok["loss_mask"]
        logprobs_A, advantages_A = (batch.column(name)[mask_N].double() for name in (LIVE_LOGPROBS, "advantages"))
        covariance_A = (logprobs_A - logprobs_A.mean()) * (advantages_A - advantages_A.mean())
        count = math.ceil(self.config.share * logprobs_A.numel())
        if self.config.treatment == "kl":
            picked = covariance_A.topk(count).indices
        else:
            indices = ((covariance_A >= self.config.low) & (covariance_A <= self.config.high)).nonzero()[:, 0]
            # The tokens with the smallest draws are a random choice.
            picked = indices[draws(batch)[mask_N][indices].argsort(stable=True)[:count]]
        selected_A = torch.zeros(logprobs_A.shape).index_fill_(0, picked, 1.0)
        return batch.with_column("tok", SELECTED, torch.zeros(batch.tokens).masked_scatter_(mask_N, selected_A))

    def surrogate(self, x: LossInput) -> tuple[Tensor, Metrics]:
        selected_A = x[SELECTED] > 0
        if self.config.treatment == "clip":
            values_A, metrics = super().surrogate(x)
            values_A = torch.where(selected_A, torch.zeros_like(values_A), values_A)
        else:
            log_A = bounded(x["logprobs"].float() - x["old_logprobs"].float())
            values_A, metrics = -log_A.exp() * x["advantages"], {"ratio": ("token", log_A.detach().exp())}
            values_A = values_A + torch.where(selected_A, self.config.kl_coef * log_A.abs(), torch.zeros_like(log_A))
        return values_A, {**metrics, "selected": ("token", selected_A.float())}


def draws(batch: Batch) -> Tensor:
    """int64 [N], within [0, 2^31): a pseudo-random number for each token. It depends only on the token, the token
    before it and its place in its sequence."""
    before_N = torch.cat([batch.ids_N[:1], batch.ids_N[:-1]])
    place_N = torch.arange(batch.tokens) - batch.starts_B[batch.seq_N]
    mixed_N = batch.ids_N
    for other_N in (before_N, place_N, place_N):
        # 31 bits after every round, so that the product with a factor of 30 bits is an int64.
        mixed_N = ((mixed_N ^ (mixed_N >> 15)) * 0x2C1B3C6D + other_N) & 0x7FFFFFFF
    return mixed_N ^ (mixed_N >> 12)
