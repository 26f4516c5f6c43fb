"""The algorithm: pairs become units of two sequences; exports hold the mean and standard deviation of the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field
from rlhf.interfaces import Algorithm, ComponentConfig, Slot
from rlhf.types import Needs, RoleSpec, RunOptions, Update

from rlhf_plugin_reward_model.moments import Moments, figures

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


class RewardModelConfig(ComponentConfig):
    """Statistics of the scores."""

    moments_decay: float = Field(default=0.9, ge=0, lt=1)
    """Decay per step of the running mean and standard deviation of the training scores. Exports hold these if there was
    no evaluation."""


class RewardModel(Algorithm):
    """Train a scalar head, and the model under it, to score the chosen answer of a pair above the rejected one.

    The policy is the reward model: it starts from a causal language model with a new head, or from a reward model.
    One optimizer step in every step of the run, on all its pairs. Every export's ``config.json`` holds ``mean`` and
    ``std`` of the scores: over the chosen and rejected answers of the last evaluation or, if there was none, running
    averages over the training pairs.
    """

    name = "reward_model"
    source = "Ouyang et al. 2022, arXiv:2203.02155, section 3.5"
    data = "pairs"
    slots = {"loss": Slot("loss", "pairwise")}
    Config = RewardModelConfig

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        self._training = Moments(self.config.moments_decay)
        self._held_out: dict[str, float] = {}

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", head="scalar", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        """Units of a chosen (role 0) and a rejected (role 1) sequence; unit column ``margin`` if rows have one."""
        from rlhf.ops.packing import SequenceData, UnitData, pack

        units = [
            UnitData(
                [SequenceData(s.ids, {"loss_mask": s.loss_mask}, s.role, s.images) for s in example.sequences],
                {"margin": float(example.values["margin"])} if "margin" in example.values else {},
            )
            for example in examples
            if any(any(s.loss_mask[1:]) for s in example.sequences)  # else both sequences are the bare prompt
        ]
        return pack(units) if units else None, {}

    def updates(self, step: int, batch: Batch | None = None) -> list[Update]:  # type: ignore[override]
        return [Update("policy", "loss")]

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        if "policy/score_mean" in metrics:  # absent where the step was skipped, or with another loss
            self._training.add(metrics["policy/score_mean"], metrics["policy/score_square"])
        return {}

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        if "eval/score_mean" in metrics:
            self._held_out = figures(metrics["eval/score_mean"], metrics["eval/score_square"])

    def model_config(self) -> dict[str, Any]:
        return dict(self._held_out) or self._training.figures()

    def state_dict(self) -> dict[str, Any]:
        return {"training": self._training.state_dict(), "held_out": dict(self._held_out)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._training.load_state_dict(state["training"])
        self._held_out = dict(state["held_out"])
