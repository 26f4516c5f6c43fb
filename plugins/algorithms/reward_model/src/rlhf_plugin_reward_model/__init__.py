"""Reward models from pairs of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rlhf import hookimpl
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import LossOutput, Needs, Reduce, RoleSpec
from rlhf.types.examples import Example

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput


class RewardModelConfig(ComponentConfig):
    """Statistics of the scores."""

    moments_decay: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean and standard deviation of the training scores. Exports hold these if there was
    no evaluation."""


class RewardModel(Algorithm[Example]):
    """Train a scalar head, and the model under it, to score the chosen answer of a pair above the rejected one.

    The policy is the reward model: it starts from a causal language model with a new head, or from a reward model. Each
    step of the run is one optimizer step on all pairs of the step. Every export's ``config.json`` holds ``mean`` and
    ``std`` of the scores: over the chosen and rejected answers of the last evaluation or, if there was none, running
    averages over the training pairs.
    """

    name = "reward_model"
    source = "Ouyang et al. 2022, arXiv:2203.02155, section 3.5"
    data = "pairs"
    slots = {"loss": Slot("loss", "pairwise")}
    Config = RewardModelConfig

    _moments: Mapping[str, float] = {"weight": 0.0, "first": 0.0, "second": 0.0}
    """Sums over the steps, each step multiplying the earlier ones by ``moments_decay``: of the weights, of the mean
    scores and of the mean squared scores. Dividing by the sum of the weights removes the bias of the first steps, as in
    Adam."""
    _held_out: Mapping[str, float] = {}
    """The :func:`figures` of the last evaluation; empty before one."""

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", head="scalar", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        """Units of a chosen (role 0) and a rejected (role 1) sequence; unit column ``margin`` if rows have one."""
        from rlhf.ops.rows import pack_rows

        # An answer without a token has a score too. Only pairs of two bare prompts are left out.
        return pack_rows(examples), {}

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        if "policy/score_mean" in metrics:  # absent if the step was skipped, or with another loss
            decay = self.config.moments_decay
            mean, square = metrics["policy/score_mean"], metrics["policy/score_square"]
            moments = {"weight": 1.0, "first": mean, "second": square}
            self._moments = {name: decay * self._moments[name] + (1 - decay) * moments[name] for name in moments}
        return {}

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if "eval/score_mean" in metrics:
            self._held_out = figures(metrics["eval/score_mean"], metrics["eval/score_square"])

    def model_config(self) -> dict[str, Any]:
        if self._held_out:
            return dict(self._held_out)
        weight, first, second = self._moments.values()
        return figures(first / weight, second / weight) if weight else {}

    def state_dict(self) -> dict[str, Any]:
        return {"training": dict(self._moments), "held_out": dict(self._held_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._moments = {name: float(state["training"][name]) for name in self._moments}
        self._held_out = dict(state["held_out"])


class PairwiseConfig(ComponentConfig):
    """Form of the loss, and its additional term."""

    loss_type: Literal["sigmoid", "logexp"] = "sigmoid"
    """``sigmoid``: -log sigma(d); ``logexp``: log(1 + exp(-d)), d the difference of the scores less the margin. Both
    compute the same function."""
    center_coef: float = Field(default=0.0, ge=0)
    """Coefficient of (chosen score + rejected score)^2, which keeps the scores around zero; 0 = off."""


class PairwiseLoss(Loss):
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
    data = "pairs"
    conformance = {"levels": {"margin": "unit"}}

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
        # Each answer of a pair is one sequence, so this only brings the scores into the order of answers.
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


def figures(mean: float, square: float) -> dict[str, float]:
    """``mean`` and ``std`` from the mean and the mean square."""
    # Rounding may make the difference negative if all scores are equal.
    return {"mean": mean, "std": math.sqrt(max(0.0, square - mean * mean))}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [RewardModel]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [PairwiseLoss]
