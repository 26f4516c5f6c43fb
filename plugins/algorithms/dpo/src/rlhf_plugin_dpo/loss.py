"""The loss ``dpo``: log-ratios of pairs, one term for each chosen type, and the metrics of a preference run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rlhf.interfaces import Loss
from rlhf.types import Annotation, Head, Level, LossOutput, Reduce
from rlhf_algorithms.pairs import pair_metrics
from torch import Tensor

from rlhf_plugin_dpo import objectives, ranks
from rlhf_plugin_dpo.config import SORTED, DPOConfig, LossType
from rlhf_plugin_dpo.weighting import LOG_SUM_SQUARES, pair_weights, tail_weights

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.ops.losses import LossInput

CHOSEN, REJECTED = 0, 1


@dataclass(frozen=True, slots=True)
class Pairs:
    """Log-ratios of policy and reference of a micro-batch's pairs, [U] each."""

    chosen_U: Tensor
    rejected_U: Tensor
    margin_U: Tensor
    """Margin of the divergence's scores; ``chosen_U - rejected_U`` for the reverse KL."""
    mean_margin_U: Tensor
    """The same, each score divided by its answer's tokens."""
    policy_U: Tensor
    """log pi(chosen) - log pi(rejected)."""


class DPOLoss(Loss):
    """Direct preference optimisation and related losses. The README has the table of types.

    Metrics, all means over pairs: ``chosen_reward`` and ``rejected_reward`` (beta times the log-ratio),
    ``reward_margin``, ``accuracy`` (chosen above rejected; a tie, as at the first step, is one half),
    ``chosen_logprobs`` and ``rejected_logprobs`` (sums over an answer's tokens), ``nll`` (mean over the chosen answer's
    tokens).

    Deviations from TRL 1.16: (1) statistics of the batch (``aot``, ``aot_unpaired``, ``sft``) are of the whole
    optimizer batch, not of a micro-batch on one rank. (2) ``label_smoothing`` makes ``sigmoid`` conservative DPO; TRL
    ignores it there. (3) An answer's length is its number of trained tokens. If the prompt is empty, TRL also counts
    the answer's first token, which no output predicts.
    """

    name = "dpo"
    source = "Rafailov et al. 2023, Direct preference optimization, arXiv:2305.18290"
    Config = DPOConfig
    data = "pairs"

    def outputs(self) -> tuple[str | Head, ...]:
        return ("logprobs", LOG_SUM_SQUARES) if self.config.wpo else ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        reference = () if self.config.reference_free else ("ref_logprobs",)
        paired = (ranks.REFERENCE_PARTNER,) if "aot" in self.config.types else ()
        unpaired = (ranks.REJECTED_PARTNER, ranks.CHOSEN_PARTNER) if "aot_unpaired" in self.config.types else ()
        return (*reference, *paired, *unpaired)

    def reduce(self) -> dict[str, Reduce]:
        terms = {}
        for name, weight in self.config.types.items():
            if name == "sft":
                terms[name] = Reduce("token_mean", roles=(CHOSEN,), coef=weight)
            else:
                terms[name] = Reduce("unit_mean", coef=weight)
        if self.config.nll_coef:
            terms["nll"] = Reduce("seq_mean_token_mean", roles=(CHOSEN,), coef=self.config.nll_coef)
        return terms

    def prepass(self) -> tuple[Annotation, ...]:
        return (Annotation("policy", "logprobs", ranks.LIVE_LOGPROBS),) if set(SORTED) & set(self.config.types) else ()

    def prepare(self, batch: Batch) -> Batch:
        if "aot" in self.config.types:
            batch = ranks.paired(batch, self.config.reference_free, self.config.ld_alpha)
        if "aot_unpaired" in self.config.types:
            batch = ranks.unpaired(batch, self.config.reference_free, self.config.ld_alpha)
        return batch

    def __call__(self, x: LossInput) -> LossOutput:
        pairs, nll_A = self._pairs(x), -x["logprobs"]
        weight_U = self._weights(x) if self.config.wpo else 1.0
        terms = {n: nll_A if n == "sft" else weight_U * self._values(n, pairs, x) for n in self.config.types}
        if self.config.nll_coef:
            terms["nll"] = nll_A
        return LossOutput(
            terms, self._metrics(x, pairs) | ({"wpo_weight": ("unit", weight_U)} if self.config.wpo else {})
        )

    def _pairs(self, x: LossInput) -> Pairs:
        c, logprobs_A = self.config, x["logprobs"]
        logratio_A = logprobs_A if c.reference_free else logprobs_A - x["ref_logprobs"]
        tokens_S = x.sum_per_sequence(torch.ones_like(logprobs_A))
        if c.ld_alpha is not None:
            weight_A = tail_weights(x.sequence_A, x.sequences, c.ld_alpha)
            logprobs_A, logratio_A = weight_A * logprobs_A, weight_A * logratio_A
        logratio_S, logprobs_S = x.sum_per_sequence(logratio_A), x.sum_per_sequence(logprobs_A)
        score_S = objectives.divergence_score(logratio_S, c.f_divergence, c.f_alpha)

        def margin(values_S: Tensor) -> Tensor:
            return x.of_role(values_S, CHOSEN) - x.of_role(values_S, REJECTED)

        return Pairs(
            chosen_U=x.of_role(logratio_S, CHOSEN),
            rejected_U=x.of_role(logratio_S, REJECTED),
            margin_U=margin(score_S),
            mean_margin_U=margin(score_S / tokens_S.clamp(min=1)),
            policy_U=margin(logprobs_S),
        )

    def _weights(self, x: LossInput) -> Tensor:
        aligned_S = x.mean_per_sequence(x["logprobs"].detach() - x["log_sum_squares"].detach())
        return pair_weights(x.of_role(aligned_S, CHOSEN), x.of_role(aligned_S, REJECTED))

    def _values(self, name: LossType, p: Pairs, x: LossInput) -> Tensor:
        """[U]: the values of one loss type."""
        c, o = self.config, objectives
        beta, smoothing = c.beta, c.label_smoothing
        match name:
            case "sigmoid":
                return o.sigmoid(p.margin_U, beta, smoothing)
            case "sigmoid_norm":
                return o.sigmoid(p.mean_margin_U, beta)
            case "hinge":
                return o.hinge(p.margin_U, beta)
            case "ipo":
                return o.ipo(p.mean_margin_U if c.ipo == "mean" else p.margin_U, beta)
            case "robust":
                return o.robust(p.margin_U, beta, smoothing)
            case "exo_pair":
                return o.exo_pair(p.margin_U, beta, smoothing)
            case "discopop":
                return o.discopop(p.margin_U, beta, c.discopop_tau)
            case "nca_pair":
                return o.nca_pair(p.chosen_U, p.rejected_U, beta)
            case "bco_pair":
                shift = x.coef["bco_shift"] if c.bco_shift == "running" else 0.0
                return o.bco_pair(p.chosen_U, p.rejected_U, beta, shift)
            case "sppo_hard":
                return o.sppo_hard(p.chosen_U, p.rejected_U, beta)
            case "apo_zero":
                return o.apo_zero(p.chosen_U, p.rejected_U, beta)
            case "apo_down":
                return o.apo_down(p.chosen_U, p.rejected_U, beta)
            case "aot":
                return o.sigmoid(p.policy_U - x[ranks.REFERENCE_PARTNER], beta, smoothing)
            case "aot_unpaired":
                chosen_U = o.sigmoid(p.chosen_U - x[ranks.REJECTED_PARTNER], beta, smoothing)
                rejected_U = o.sigmoid(x[ranks.CHOSEN_PARTNER] - p.rejected_U, beta, smoothing)
                return chosen_U + rejected_U - (chosen_U + rejected_U).detach() / 2
            case _:
                raise AssertionError(name)

    def _metrics(self, x: LossInput, p: Pairs) -> dict[str, tuple[Level, Tensor]]:
        beta, logprobs_A = self.config.beta, x["logprobs"].detach()
        logprobs_S = x.sum_per_sequence(logprobs_A)
        chosen_U, rejected_U = beta * p.chosen_U.detach(), beta * p.rejected_U.detach()
        values_U = {
            "chosen_logprobs": x.of_role(logprobs_S, CHOSEN),
            "rejected_logprobs": x.of_role(logprobs_S, REJECTED),
            "nll": x.of_role(x.mean_per_sequence(-logprobs_A), CHOSEN),
        }
        return pair_metrics(chosen_U, rejected_U) | {name: ("unit", values) for name, values in values_U.items()}
