"""Base classes of the algorithms that learn from pairs of a data set, and of their losses without a reference."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from rlhf.interfaces.algorithm import Algorithm
from rlhf.interfaces.loss import Loss
from rlhf.types import DataForm, LossOutput, Reduce
from rlhf.types.examples import Example

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput
    from rlhf.types.losses import How
    from torch import Tensor


class PairLearning(Algorithm[Example]):
    """One optimizer step per step of the run, on all pairs of the step, with the loss in the slot ``loss``. A complete
    example::

        class Mine(PairLearning):
            name = "mine"
            slots = {"loss": Slot("loss", "mine")}

    For a reference, override ``needs`` and ``annotations``.

    A unit is a pair: a sequence of role 0 (chosen) and one of role 1 (rejected). If ``data.margin`` names a column,
    losses with ``margin`` among their ``columns()`` read it, one number per pair. A pair is left out and counted
    (metric ``pairs/left_out``) if one of its answers has no token to train on. The log-prob of such an answer would be
    0 for every policy.
    """

    data: ClassVar[DataForm] = "pairs"

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        """Pack the pairs and count the pairs that were left out."""
        # Imported here, because it needs torch, and most users of a base class do not.
        from rlhf.ops.rows import pack_rows

        batch = pack_rows(examples, all)
        if batch is None:
            return None, {}
        left_out = len(examples) - batch.units
        return batch, {"pairs/left_out": float(left_out)} if left_out else {}


class ContrastLoss(Loss):
    """Contrasts the log-probs of a pair's two answers, without a reference. It may also imitate the chosen answer.

    A subclass defines :meth:`contrast` and a Config with ``beta``, the scale of the rewards, and ``nll_coef``, the
    coefficient of the chosen answers' negative log-likelihood.

    Terms: one with the loss's name, the mean over pairs; with ``nll_coef`` also ``nll``, multiplied by it. Metrics:
    ``accuracy``, ``reward_margin``, ``chosen_reward`` and ``rejected_reward`` of the rewards beta x (shaped) log-prob;
    ``chosen_logprobs`` and ``rejected_logprobs``.
    """

    data = "pairs"

    @property
    def per_token(self) -> bool:
        """Whether the log-prob of an answer is the mean over its tokens; else it is the sum."""
        return True

    @property
    def nll_how(self) -> How:
        """How to average the likelihood of the chosen answers."""
        return "token_mean"

    @abstractmethod
    def contrast(self, difference_U: Tensor) -> Tensor:
        """[U]: the loss of each pair. ``difference_U`` is the (shaped) log-prob of the chosen answer minus that of the
        rejected answer."""

    def shaped(self, logprob_U: Tensor) -> Tensor:
        """The reward of an answer, before the factor beta. Default: its log-prob."""
        return logprob_U

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def reduce(self) -> dict[str, Reduce]:
        terms = {self.name: Reduce("unit_mean")}
        if self.config.nll_coef:
            terms["nll"] = Reduce(self.nll_how, roles=(0,), coef=self.config.nll_coef)
        return terms

    def __call__(self, x: LossInput) -> LossOutput:
        from rlhf_algorithms.pairs import pair_metrics

        logprobs_A, beta = x["logprobs"], self.config.beta
        logprob_S = x.mean_per_sequence(logprobs_A) if self.per_token else x.sum_per_sequence(logprobs_A)
        chosen_U, rejected_U = x.of_role(logprob_S, 0), x.of_role(logprob_S, 1)
        chosen_reward_U, rejected_reward_U = self.shaped(chosen_U), self.shaped(rejected_U)
        terms = {self.name: self.contrast(chosen_reward_U - rejected_reward_U)}
        if self.config.nll_coef:
            terms["nll"] = -logprobs_A
        metrics = pair_metrics(beta * chosen_reward_U, beta * rejected_reward_U)
        metrics |= {"chosen_logprobs": ("unit", chosen_U), "rejected_logprobs": ("unit", rejected_U)}
        return LossOutput(terms, metrics)
