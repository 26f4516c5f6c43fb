"""White-box distillation from a teacher with the same tokenizer, on given answers or on the student's own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import Annotation, Group, Head, Lent, Needs, RoleSpec, RunOptions, Snapshot, Update
from rlhf.types.examples import Example
from rlhf_algorithms.policy_gradient_config import TeacherConfig, TeacherModelConfig
from rlhf_algorithms.teacher import Teacher

from rlhf_plugin_distill.divergence import HIDDEN, TEACHER, TOP, split_top, top_head
from rlhf_plugin_distill.loss import Distill

if TYPE_CHECKING:
    from rlhf.interfaces.tokens import Tokens
    from rlhf.ops.batch import Batch
    from torch import Tensor


def _in_bf16(hidden_CH: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return hidden_CH.bfloat16()


class DistillationConfig(ComponentConfig):
    hidden: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the teacher's hidden states are kept and sent: 4 or 2 bytes x tokens x hidden size."""

    @property
    def teacher_output(self) -> str | Head:
        return "hidden" if self.hidden == "fp32" else Head("hidden_bf16", _in_bf16, reads="hidden")


class DistillDemonstrations(Algorithm[Example]):
    """Train the student on demonstrations and, at each of their tokens, on the teacher's whole next-token distribution.

    The teacher (``--roles.teacher.model PATH``) needs the student's tokenizer. Its size, its head and the padding of
    its vocabulary may differ. It reads the rows once per step. Rows without trained tokens are left out.
    """

    name = "distill"
    source = "Hinton et al. 2015, https://arxiv.org/abs/1503.02531; GKD, https://arxiv.org/abs/2306.13649"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "distill")}
    Config = DistillationConfig

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", trained=True), RoleSpec(TEACHER)), loans=(Lent(TEACHER, borrower="policy"),))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.rows import pack_rows

        return pack_rows(examples), {}

    def annotations(self, step: int) -> list[Annotation]:
        return [Annotation(TEACHER, self.config.teacher_output, HIDDEN)]


class DistillOnPolicy(Algorithm[Group]):
    """The student answers prompts and learns the teacher's distribution at each token of its own answers.

    No reward is needed. If a run has one, it is reported and filters see it, but the loss does not read it. No gradient
    flows through the sampling. The distributions over the whole vocabulary are compared at ``loss.temperature``,
    whatever the sampling temperature.

    With ``sampled`` below 1 (lambda of GKD, Algorithm 1) the student learns from the data's answers in the other rows,
    as with ``distill`` and alpha = 1. Deviation: Algorithm 1 draws once per step whether the whole batch is sampled.
    Here each row is drawn separately, from the run's seed and the number of its group, so steps cost about the same and
    a resumed run draws the same rows.

    The teacher may be the student itself, and may read a text that the student does not see (``teacher``). If the
    teacher's weights change during the run (``live``, ``averaged``), it sends its ``loss.top_k`` most probable tokens
    instead, because an output head is lent only once. Samples that the teacher does not read are left out.
    """

    name = "distill_on_policy"
    source = "Agarwal et al. 2023, On-policy distillation (GKD), https://arxiv.org/abs/2306.13649"
    data = "prompts"
    slots = {"loss": Slot("loss", "distill", {"divergence": "reverse_kl", "alpha": 1.0})}

    class Config(DistillationConfig):
        sampled: float = Field(default=1.0, gt=0, le=1)
        """Share of the rows whose answers the student samples; the data gives the answers of the other rows."""
        teacher: TeacherModelConfig = TeacherModelConfig()
        """The weights of the teacher, and what it reads."""

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        loss, teacher = self.parts["loss"], self.config.teacher
        alpha = getattr(loss.config, "alpha", 1.0)
        if alpha < 1:
            raise ConfigError(
                f"algorithm.loss.alpha = {alpha} gives the cross-entropy to the student's own samples the weight "
                f"{1 - alpha:g}; its expected gradient is zero. Set --algorithm.loss.alpha 1, or use distill on given "
                "answers."
            )
        self._changes = teacher.weights in ("live", "averaged")
        output, column = self.config.teacher_output, HIDDEN
        if self._changes:
            self._check_changing(loss, teacher.weights)
            # Only the algorithm knows that the teacher's weights change; it is no option of the loss.
            loss.by_ids = True
            output, column = top_head(loss.config.top_k, loss.config.temperature), TOP
        # coef is not used, but 0 would turn the teacher off. Rewards that teach give the log-probs of sampled tokens,
        # not distributions.
        credit = TeacherConfig(coef=1.0, task=False, **dict(teacher))
        self.teacher = Teacher(credit, replace(self.run, teachers={}), output, column)

    def _check_changing(self, loss: Loss, weights: str) -> None:
        """Raises ConfigError for options that do not fit a teacher whose weights change."""
        if not isinstance(loss, Distill) or loss.config.top_k is None:
            raise ConfigError(
                f"algorithm.teacher.weights = {weights!r} changes the teacher's output head in each step, but the "
                "whole distribution is computed with a head that is lent once. Let the teacher send its most probable "
                "tokens (--algorithm.loss.top_k 100 of the loss 'distill'), or set --algorithm.teacher.weights base"
            )
        if self.config.hidden != "fp32":
            raise ConfigError(
                f"algorithm.hidden = {self.config.hidden!r} applies to a teacher's hidden states, but a teacher with "
                f"weights = {weights!r} sends its most probable tokens; remove algorithm.hidden"
            )

    def needs(self) -> Needs:
        roles = (RoleSpec("policy", trained=True), *self.teacher.roles())
        loans = () if self._changes else (Lent(TEACHER, borrower="policy"),)
        return Needs(roles, reward=False, demonstration_share=1 - self.config.sampled, loans=loans)

    def use_tokens(self, tokens: Tokens) -> None:
        self.teacher.opening = tokens.opening

    def columns(self, source: str) -> list[str]:
        context = self.config.teacher.context
        return [*super().columns(source), *([] if context is None else [context])]

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:
        from rlhf.ops.experts import EXPERTS
        from rlhf.ops.trajectories import assemble
        from rlhf_algorithms.pipeline import length_metrics

        batch = assemble(examples, scored=False)
        if batch is None:
            return None, {}
        sampled_units = [
            unit for unit, from_data in enumerate(batch.unit["is_demonstration"].tolist()) if not from_data
        ]
        metrics = length_metrics(batch.select(sampled_units)) if sampled_units else {}
        batch, left_out = self.teacher.prepared(batch, examples)
        # Without the column temperature: heads read the student's unscaled logits.
        columns = ("loss_mask", "own_tokens", "truncated", "is_demonstration", EXPERTS)
        batch = batch.select_columns((*columns, *self.teacher.masks))
        return self.teacher.only_taught(batch), metrics | left_out

    def annotations(self, step: int) -> list[Annotation]:
        return self.teacher.annotations()

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        batch = self.teacher.read(batch)
        return (split_top(batch) if self._changes else batch), {}

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        return [*super().updates(step, batch), *self.teacher.snapshots()]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [DistillDemonstrations, DistillOnPolicy]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [Distill]
