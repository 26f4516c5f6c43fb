"""The Bradley-Terry loss of a pair of scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.types import LossOutput, Reduce

if TYPE_CHECKING:
    from rlhf.ops.losses import LossInput


class PairwiseConfig(ComponentConfig):
    """Form of the loss, and its additional term."""

    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """``sigmoid``: -log sigma(d); ``logexp``: log(1 + exp(-d)), d the difference of the scores less the margin. Both
    compute the same function."""
    center_coef: float = Field(default=0.0, ge=0)
    """Coefficient of (chosen score + rejected score)^2, which keeps the scores around zero; 0 = off."""


class Pairwise(Loss):
    """-log sigma(r_c - r_r - m), the mean over pairs; r is the score at a sequence's last token.

    m is the unit column ``margin`` if the batch has one (Llama 2, equation 2), else 0. Both forms are finite for any
    finite difference, and so are their gradients. With ``center_coef`` c the term c (r_c + r_r)^2 is added, also the
    mean over pairs (Eisenstein et al. 2023, arXiv:2312.09244, equation 2).

    Metrics: ``accuracy`` (share of pairs with r_c > r_r, whatever the margin; a tie is one half), ``margin``
    (r_c - r_r),
    ``chosen_score``, ``rejected_score``; ``score_mean`` and ``score_square``, the mean of all scores and of their
    squares.
    """

    name = "pairwise"
    source = "Bradley-Terry; Ouyang et al. 2022, arXiv:2203.02155, equation 1; Touvron et al. 2023, arXiv:2307.09288"
    Config = PairwiseConfig
    conformance = {"data": "pairs", "levels": {"margin": "unit"}}

    def outputs(self) -> tuple[str, ...]:
        return ("scores",)

    def columns(self) -> tuple[str, ...]:
        return ("margin",)

    def reduce(self) -> dict[str, Reduce]:
        terms = {"pairwise": Reduce("unit_mean")}
        if self.config.center_coef:
            terms["center"] = Reduce("unit_mean", coef=self.config.center_coef)
        return terms

    def __call__(self, x: LossInput) -> LossOutput:
        from torch.nn import functional

        scores_B = x["scores"]
        scores_S = scores_B.new_zeros(x.sequences).index_add(0, x.answer_B, scores_B)
        chosen_U, rejected_U = x.of_role(scores_S, 0), x.of_role(scores_S, 1)
        margin_U = chosen_U - rejected_U
        d_U = margin_U - x["margin"].to(margin_U.dtype) if x.has("margin") else margin_U
        values_U = -functional.logsigmoid(d_U) if self.config.loss_type == "sigmoid" else functional.softplus(-d_U)
        terms = {"pairwise": values_U}
        if self.config.center_coef:
            terms["center"] = (chosen_U + rejected_U).square()
        return LossOutput(
            terms,
            {
                "accuracy": ("unit", (1 + margin_U.sign()) / 2),
                "margin": ("unit", margin_U),
                "chosen_score": ("unit", chosen_U),
                "rejected_score": ("unit", rejected_U),
                "score_mean": ("sequence", scores_S),
                "score_square": ("sequence", scores_S.square()),
            },
        )
