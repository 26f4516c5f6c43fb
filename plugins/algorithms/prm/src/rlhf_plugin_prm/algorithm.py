"""The algorithm: solutions with labelled steps become units of one sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator
from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm, ComponentConfig, Slot, Tokens
from rlhf.types import Needs, RoleSpec
from rlhf.types.examples import Example

from rlhf_plugin_prm.heads import CLASSES, RIGHT_TOKEN, STEP_END, WRONG_TOKEN, step_logits
from rlhf_plugin_prm.step_labels import LABEL, StepLabels

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch


class ProcessRewardModelConfig(ComponentConfig):
    """The outputs that tell whether a step is right."""

    head: Literal["classes", "lm"] = "classes"
    """``classes``: two outputs of a classification head. ``lm``: the logits of two label tokens of a language model."""
    label_tokens: tuple[str, str] | None = Field(default=None)
    """With ``head = "lm"``: the texts for right and for wrong, e.g. ["+", "-"]; each must be one token."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.head == "lm" and self.label_tokens is None:
            raise ValueError('head = "lm" needs label_tokens: the texts for right and for wrong, e.g. ["+", "-"]')
        if self.head == "classes" and self.label_tokens is not None:
            raise ValueError('label_tokens are read only with head = "lm"; set it, or remove label_tokens')
        return self


class ProcessRewardModel(Algorithm[Example]):
    """Train a model to tell, after each step of a solution, whether the step is right.

    The policy is the process reward model. It starts from a causal language model (``classes`` adds a new head), or
    from a process reward model. Each step of the run is one optimizer step on all solutions of the step. Solutions
    without a step are left out.
    """

    name = "prm"
    source = "Lightman et al. 2023, arXiv:2305.20050"
    data = "steps"
    slots = {"loss": Slot("loss", "step_labels")}
    Config = ProcessRewardModelConfig

    _labels: Mapping[str, int] = {}
    """{key of an exported ``config.json``: id of the label token}, for ``head = "lm"``."""

    def needs(self) -> Needs:
        head = "lm" if self.config.head == "lm" else CLASSES
        return Needs((RoleSpec("policy", head=head, trained=True),))

    def use_tokens(self, tokens: Tokens) -> None:
        """Resolve the label tokens. Raises ConfigError if a text is not a single token, or both are the same token."""
        if self.config.label_tokens is None:
            return
        right, wrong = (tokens.single(text, "algorithm.label_tokens") for text in self.config.label_tokens)
        if right == wrong:
            raise ConfigError(
                f"algorithm.label_tokens: {list(self.config.label_tokens)} are the same token ({right}); right and "
                "wrong need different tokens"
            )
        self._labels = {RIGHT_TOKEN: right, WRONG_TOKEN: wrong}
        if isinstance(self.parts["loss"], StepLabels):  # other losses declare their own heads
            self.parts["loss"] = StepLabels(self.parts["loss"].config, step_logits(right, wrong))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        """Token columns ``step_end`` (bool) and ``step_label`` (the label there, 0 elsewhere)."""
        from rlhf.ops.packing import SequenceData, UnitData, pack

        units = []
        for example in examples:
            labels: dict[int, float] = dict(example.values["steps"])
            (sequence,) = example.sequences
            tok: dict[str, Any] = {
                "loss_mask": sequence.loss_mask,
                STEP_END: [i in labels for i in range(len(sequence.ids))],
                LABEL: [float(labels.get(i, 0.0)) for i in range(len(sequence.ids))],
            }
            if labels:
                units.append(UnitData([SequenceData(sequence.ids, tok, images=sequence.images)]))
        return pack(units) if units else None, {}

    def model_config(self) -> dict[str, Any]:
        """The meaning of the labels, written to ``config.json`` of exported models."""
        if self.config.head == "lm":
            return dict(self._labels)
        return {"id2label": {"0": "wrong", "1": "right"}, "label2id": {"wrong": 0, "right": 1}}
