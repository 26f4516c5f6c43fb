"""The loss of distillation: cross-entropy on the data plus the divergence from the teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import Head, LossOutput, Reduce

from rlhf_plugin_distill.divergence import HIDDEN, TOP_IDS, TOP_LOGPROBS, Divergence, divergence_head

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput
    from torch import Tensor


class DistillConfig(ComponentConfig):
    divergence: Divergence = "forward_kl"
    """``forward_kl``: KL(teacher || student), ``reverse_kl``: KL(student || teacher), ``jsd``: generalised
    Jensen-Shannon."""
    beta: float | None = Field(default=None, gt=0, lt=1)
    """``jsd`` only: the teacher's share of the mixture; 0.5 where absent."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits of both models before they are compared. The cross-entropy is computed at temperature 1."""
    top_k: int | None = Field(default=None, ge=1)
    """Compare this number of the teacher's most probable tokens, and all others as one. Default: every token by
    itself."""
    alpha: float = Field(default=0.5, gt=0, le=1)
    """(1 - alpha) cross-entropy + alpha divergence; 1 = divergence only."""
    reduce: Literal["token_mean", "seq_mean_token_mean"] = "token_mean"
    """``token_mean``: every trained token of the batch counts the same. ``seq_mean_token_mean``: every row does."""

    @model_validator(mode="after")
    def _consistent(self) -> DistillConfig:
        if self.beta is not None and self.divergence != "jsd":
            raise ValueError(
                f"beta = {self.beta} applies only to divergence = 'jsd', got {self.divergence!r}: remove beta"
            )
        return self


def made_up(suite: Any, name: str, size: int, seed: int) -> Tensor:
    """A teacher's hidden states, for the conformance suite (``column`` of :class:`rlhf_testing.loss.LossContract`)."""
    import torch

    return torch.randn(size, suite.hidden_size, generator=torch.Generator().manual_seed(seed))


class Distill(Loss):
    """(1 - alpha) CE + alpha D(teacher, student) at a temperature, at the positions that predict trained tokens.

    Deviations: (1) no factor temperature^2 on D (Hinton et al. 2015, arXiv:1503.02531, multiply by it). (2) D(beta) of
    ``jsd`` is as published, not divided by beta or 1 - beta.

    Metrics: ``divergence`` (nats per token), ``agreement`` (share of tokens where both models have the same argmax),
    ``nll`` if alpha < 1.
    """

    name = "distill"
    source = "Agarwal et al. 2023, On-policy distillation (GKD), https://arxiv.org/abs/2306.13649"
    Config = DistillConfig
    data = "demonstrations"
    conformance = {"column": made_up}

    by_ids = False
    """Whether the batch has the teacher's most probable tokens instead of its hidden states."""

    def outputs(self) -> tuple[str | Head, ...]:
        c = self.config
        head = divergence_head(c.divergence, c.beta or 0.5, c.temperature, c.top_k, self.by_ids)
        return ("logprobs", head) if c.alpha < 1 else (head,)

    def columns(self) -> tuple[str, ...]:
        return (TOP_IDS, TOP_LOGPROBS) if self.by_ids else (HIDDEN,)

    def reduce(self) -> dict[str, Reduce]:
        alpha, reduction = self.config.alpha, self.config.reduce
        terms = {"divergence": Reduce(reduction, coef=alpha)}
        return {"nll": Reduce(reduction, coef=1 - alpha), **terms} if alpha < 1 else terms

    def __call__(self, x: LossInput) -> LossOutput:
        d_A, agree_A = x["divergence"].unbind(1)
        terms, metrics = {"divergence": d_A}, {"divergence": d_A, "agreement": agree_A}
        if self.config.alpha < 1:
            terms["nll"] = metrics["nll"] = -x["logprobs"]
        return LossOutput(terms, {name: ("token", values) for name, values in metrics.items()})
