"""White-box distillation from a teacher of the same tokenizer: on given answers, and on the student's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import Annotation, Group, Head, Lent, Needs, RoleSpec, Update

from rlhf_plugin_distill.divergence import HIDDEN, TEACHER
from rlhf_plugin_distill.loss import Distill

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example
    from torch import Tensor


def _in_bf16(hidden_CH: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return hidden_CH.bfloat16()


class _Distillation(Algorithm):
    """A policy, a teacher that is not trained, and the teacher's hidden states at the tokens under the loss mask."""

    class Config(ComponentConfig):
        hidden: Literal["fp32", "bf16"] = "fp32"
        """Precision in which the teacher's hidden states are kept and sent: 4 or 2 bytes x tokens x hidden size."""

    def needs(self) -> Needs:
        roles = (RoleSpec("policy", trained=True), RoleSpec(TEACHER))
        return Needs(roles, reward=self.data != "prompts", lent=(Lent(TEACHER, to="policy"),))

    def annotations(self, step: int) -> list[Annotation]:
        output = "hidden" if self.config.hidden == "fp32" else Head("hidden_bf16", _in_bf16, reads="hidden")
        return [Annotation(TEACHER, output, HIDDEN)]

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:  # type: ignore[override]
        return [Update("policy", "loss")]


class DistillDemonstrations(_Distillation):
    """The student learns demonstrations, and at each of their tokens the teacher's whole distribution.

    The teacher (``--roles.teacher.model PATH``) needs the student's tokenizer; size, head and the padding of the
    vocabulary are its own. It runs over the rows once a step; rows in which no token is trained on are left out.
    """

    name = "distill"
    source = "Hinton et al. 2015, https://arxiv.org/abs/1503.02531; GKD, https://arxiv.org/abs/2306.13649"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "distill")}

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        from rlhf.ops.rows import pack_rows

        return pack_rows(examples), {}


class DistillOnPolicy(_Distillation):
    """The student answers prompts and learns the teacher's distribution at each token of its own answers.

    No reward is needed; where a run has one it is reported and filters, and is not learnt from. No gradient flows
    through the sampling. The whole vocabulary is compared, at ``loss.temperature``, whatever temperature the answers
    were sampled at.

    With ``sampled`` below 1 (lambda of GKD, Algorithm 1) the other rows' own answers are learnt from, as ``distill``
    with alpha = 1 does. Deviation: Algorithm 1 draws once a step whether its whole batch is sampled; here every row is
    drawn for itself, by the run's seed and its group's number, so steps are alike in cost and a resume draws the same.
    """

    name = "distill_on_policy"
    source = "Agarwal et al. 2023, On-policy distillation (GKD), https://arxiv.org/abs/2306.13649"
    data = "prompts"
    slots = {"loss": Slot("loss", "distill", {"divergence": "reverse_kl", "alpha": 1.0})}

    class Config(_Distillation.Config):
        sampled: float = Field(default=1.0, gt=0, le=1)
        """Share of the rows whose answers the student samples; the others have theirs from the data."""

    def __init__(self, config: ComponentConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(config, parts)
        alpha = getattr(self.parts["loss"].config, "alpha", 1.0)
        if alpha < 1:
            raise ConfigError(
                f"algorithm.loss.alpha = {alpha} weighs the cross-entropy to the student's own samples by "
                f"{1 - alpha:g}; its expected gradient is zero. Set --algorithm.loss.alpha 1, or use distill on given "
                "answers."
            )

    def needs(self) -> Needs:
        return replace(super().needs(), given=1 - self.config.sampled)

    def assemble(self, examples: Sequence[Group]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        from rlhf.ops.trajectories import assemble
        from rlhf_algorithms.pipeline import length_metrics

        batch = assemble(examples, scored=False)
        if batch is None:
            return None, {}
        # Without the column temperature: heads read the student's logits as they are.
        batch = batch.only(("loss_mask", "own_tokens", "truncated", "given"))
        own = [unit for unit, given in enumerate(batch.unit["given"].tolist()) if not given]
        return batch, length_metrics(batch.select(own)) if own else {}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [DistillDemonstrations, DistillOnPolicy]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [Distill]
