"""What the policy losses share: aggregation, train-inference correction, entropy, and the metrics of drift."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from rlhf.errors import TrainingError
from rlhf.interfaces import ComponentConfig, Loss
from rlhf.ops.batch import Batch
from rlhf.ops.correction import CorrectionConfig, correction_weights
from rlhf.ops.kl import k3
from rlhf.types import LossOutput, OnlineShape, Reduce
from torch import Tensor

Metrics = dict[str, tuple[Any, Tensor]]


class PolicyLossConfig(ComponentConfig):
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"] = "token_mean"
    """How tokens become one number, over the whole optimizer batch; ``seq_sum_constant`` divides by the number of
    answers times ``max_length``."""
    max_length: int | None = Field(default=None, gt=0)
    """For ``seq_sum_constant`` only: the most tokens that an answer may have (``sampling.max_new_tokens``, over all
    turns). Less is refused; a smaller limit in sampling only scales the loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Weights for samples drawn with other numbers than the trainer's (generator precision, staleness)."""
    entropy_coef: float | None = None
    """Entropy bonus: absent = entropy is not computed, 0 = reported only."""

    @model_validator(mode="after")
    def _constant(self) -> Self:
        if (self.aggregation == "seq_sum_constant") != (self.max_length is not None):
            raise ValueError(
                f"max_length = {self.max_length} with aggregation = {self.aggregation!r}: 'seq_sum_constant' needs "
                "max_length (the most tokens an answer may have), the other aggregations have no use for it"
            )
        return self


class PolicyLoss(Loss):
    """A loss per token from ``logprobs`` and ``advantages``; subclasses give :meth:`surrogate`.

    Terms: ``policy`` and, with a bonus, ``entropy``. Metrics: ``kl_old`` (policy now against the start of the update)
    and ``kl_generator`` (trainer against generator), both by k3 and >= 0; ``correction_weight``; ``entropy``.
    """

    Config: ClassVar[type[ComponentConfig]] = PolicyLossConfig
    reads_old: ClassVar[bool] = True
    """Whether the surrogate reads ``old_logprobs``."""

    @property
    def generator_logprobs(self) -> bool:
        return self.config.correction.active

    @abstractmethod
    def surrogate(self, x: Any) -> tuple[Tensor, Metrics]:
        """(Loss value per token [A], metrics)."""

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",) if self.config.entropy_coef is None else ("logprobs", "entropy")

    def columns(self) -> tuple[str, ...]:
        old = ("old_logprobs",) if self.reads_old or self.config.correction.active else ()
        return ("advantages", *old, "gen_logprobs")

    def reduce(self) -> dict[str, Reduce]:
        c = self.config
        how = Reduce(c.aggregation, constant=float(c.max_length or 1))
        terms = {"policy": how}
        if c.entropy_coef:
            terms["entropy"] = Reduce(c.aggregation, coef=-c.entropy_coef, constant=how.constant)
        return terms

    def misfits(self, shape: OnlineShape) -> list[str]:
        limit, longest = self.config.max_length, shape.answer_tokens
        if limit is None or longest <= limit:
            return []
        return [
            f"algorithm.loss.max_length = {limit}, and an answer can have {longest} own tokens "
            f"(sampling.max_new_tokens, times the turns): the first longer one would end the run. Set "
            f"--algorithm.loss.max_length {longest}."
        ]

    def prepare(self, batch: Batch) -> Batch:
        """Refuse answers beyond ``max_length``, whose share the constant would get wrong."""
        limit = self.config.max_length
        if limit is not None:
            own_U = batch.tok["loss_mask"].new_zeros(batch.units, dtype=batch.unit_B.dtype)
            longest = int(own_U.index_add(0, batch.unit_N, batch.tok["loss_mask"].to(own_U.dtype)).max())
            if longest > limit:
                raise TrainingError(
                    f"an answer has {longest} own tokens, above algorithm.loss.max_length = {limit}; set it to the "
                    "most tokens an answer may have (sampling.max_new_tokens, times the turns)"
                )
        return batch

    def __call__(self, x: Any) -> LossOutput:
        values_A, metrics = self.surrogate(x)
        if self.config.correction.active:
            weights_A = correction_weights(
                x["old_logprobs"], x["gen_logprobs"], x.sequence_A, x.sequences, self.config.correction
            )
            values_A = weights_A * values_A
            metrics["correction_weight"] = ("token", weights_A)
            metrics["correction_masked"] = ("token", (weights_A == 0).float())
        if x.has("old_logprobs"):
            metrics["kl_old"] = ("token", k3(x["old_logprobs"] - x["logprobs"].detach()))
        if x.has("gen_logprobs"):
            trainer_A = x["old_logprobs"] if x.has("old_logprobs") else x["logprobs"].detach()
            metrics["kl_generator"] = ("token", k3(x["gen_logprobs"] - trainer_A))
        terms = {"policy": values_A}
        if self.config.entropy_coef is not None:
            metrics["entropy"] = ("token", x["entropy"])
            if self.config.entropy_coef:
                terms["entropy"] = x["entropy"]
        return LossOutput(terms, metrics)
