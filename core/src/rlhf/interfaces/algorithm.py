"""Algorithms: a named bundle of advantage, losses and rollout with vetted defaults and declared needs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.tokens import Tokens
from rlhf.types import Annotation, DataForm, Group, Needs, OnlineShape, Snapshot, Update

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


@dataclass(frozen=True, slots=True)
class Slot:
    """A part that the algorithm names but does not import: kind, default plugin and defaults on top of the
    plugin's own. ``[algorithm.<slot>] use = "..."`` replaces it, and with it these defaults."""

    kind: str
    use: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(Component):
    """Lives on the driver, may keep state. The controllers ask these methods in this order, once a step.

    The runtime builds ``cls(config, parts)`` with one instance per slot. A complete example is the page
    ``docs/tutorial/first-algorithm.md``; base classes that algorithms
    share are in the library ``rlhf_algorithms``.
    """

    data: ClassVar[DataForm] = "prompts"
    """Chooses the controller: ``prompts`` is online (rollouts), everything else offline (rows)."""
    slots: ClassVar[Mapping[str, Slot]] = {}

    def __init__(self, config: ComponentConfig | None = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self.parts: dict[str, Any] = dict(parts or {})
        self.step_sources: dict[str, float] = {}
        """Set by the runtime before the first step: {reward source with ``credit = "step"``: its weight}. An online
        algorithm hands it to :func:`rlhf.ops.trajectories.assemble`."""
        self.max_tokens: int | None = None
        """Set by the runtime before the first step: ``data.max_tokens``, which every row and sample keeps to. An
        algorithm that makes sequences of its own keeps to it too."""

    @abstractmethod
    def needs(self) -> Needs:
        """Roles, smallest group, generator log-probs: a function of the config and the parts."""

    def use_tokens(self, tokens: Tokens) -> None:
        """Once, before a model is loaded: whatever depends on the policy's tokenizer. Raises ConfigError where that
        does not have what the options ask for."""
        return

    def misfits(self, shape: OnlineShape) -> list[str]:
        """Online, before a model is loaded: which options could not do what they say in a run of this shape, one
        sentence each, with what to set. Default: what the losses say."""
        return [line for part in self.parts.values() if isinstance(part, Loss) for line in part.misfits(shape)]

    @abstractmethod
    def assemble(self, examples: Sequence[Group] | Sequence[Example]) -> Batch | None:
        """Groups (online) or tokenised examples (offline) become units. None: nothing to learn from (counted).

        A sample with an empty answer is a unit too, without a token under ``loss_mask``: its reward counts in its
        group. ``credit`` and the losses must expect it."""

    def annotations(self, step: int) -> list[Annotation]:
        """Columns to compute before the update."""
        return []

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Rewards become advantage columns, on the driver. Default: nothing to do (offline)."""
        return batch, {}

    @abstractmethod
    def updates(self, step: int) -> list[Update | Snapshot]:
        """What is trained this step, in order. Asked before the run too, for every step, and before ``assemble``: what
        it says then, learning rates are planned by; a batch that came short may have fewer minibatches."""

    def finish(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """After the updates, with the step's metrics: adapt coefficients. Returns further metrics."""
        return {}

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """After an evaluation, with its metrics (``eval/...``)."""
        return

    def model_config(self) -> dict[str, Any]:
        """JSON values that belong into the ``config.json`` of every model that the run exports (a reward model's mean
        and standard deviation)."""
        return {}
