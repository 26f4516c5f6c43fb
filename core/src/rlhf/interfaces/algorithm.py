"""Algorithms: a named combination of advantage and losses, with defaults and declared requirements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rlhf.interfaces.advantage import Advantage
from rlhf.interfaces.component import Component, ComponentConfig
from rlhf.interfaces.loss import Loss
from rlhf.interfaces.tokens import Tokens
from rlhf.types import Annotation, DataForm, Group, Needs, OnlineShape, RoleSpec, RunOptions, Snapshot, Update

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


Examples = TypeVar("Examples", bound="Group | Example")
"""What ``assemble`` gets: ``Algorithm[Group]`` learns from samples, ``Algorithm[Example]`` from tokenised rows."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A part that the algorithm names but does not import: the kind, the default plugin, and defaults that replace the
    plugin's own. ``[algorithm.<slot>] use = "..."`` chooses another plugin, to which these defaults do not apply."""

    kind: str
    use: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Algorithm(Component, Generic[Examples]):
    """Decides what a step learns from and what it trains. It runs on the driver and holds no model.

    In every step the runtime calls ``assemble``, ``annotations``, ``credit``, ``updates`` and ``finish``, in this order
    and once each. Each method gets the batch that it needs, so an algorithm keeps nothing between the calls. An
    evaluation may call the first four in between. State that must outlive a step (an adaptive coefficient) belongs in
    ``state_dict``.

    The runtime builds ``cls(config, parts, run)`` with one instance per slot. ``docs/tutorial/first-algorithm.md`` is a
    complete example. The library ``rlhf_algorithms`` has base classes that algorithms share.
    """

    data: ClassVar[DataForm] = "prompts"
    """Form of the data. ``prompts``: the policy answers them and learns from its samples. All other forms: the
    algorithm trains on the rows themselves."""
    slots: ClassVar[Mapping[str, Slot]] = {}
    has_members: ClassVar[bool] = False
    """Whether the run file names further algorithms, the members: ``[algorithm.members.NAME] use = "..."``, with the
    options and slots of that algorithm in the same table. ``Config`` then has a field ``members: Mapping[str, M]``. M
    is a ComponentConfig with ``use`` and the member options that this algorithm itself reads. The runtime builds each
    member with the same ``run`` as ``parts["members.NAME"]``."""

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        """``run``: None for a run file with the defaults of :class:`rlhf.types.RunOptions`."""
        super().__init__(config)
        self.parts: dict[str, Any] = dict(parts or {})
        self.run = run or RunOptions()

    def needs(self) -> Needs:
        """Requirements on the run: roles, samples per group, log-probs of the generator. They depend only on the config
        and the parts. Default: a policy that is trained."""
        return Needs((RoleSpec("policy", trained=True),))

    def use_tokens(self, tokens: Tokens) -> None:
        """Called once, before a model is loaded, with the policy's tokenizer. Raises ConfigError if an option names a
        token that the tokenizer does not have."""
        return

    def conflicts(self, shape: OnlineShape) -> list[str]:
        """Options that cannot have their effect in a run of this shape: one sentence each, with what to set instead.
        Called before a model is loaded, for data form ``prompts`` only. Default: the sentences of the losses."""
        return [line for part in self.parts.values() if isinstance(part, Loss) for line in part.conflicts(shape)]

    def columns(self, source: str) -> Collection[str]:
        """Columns of a source that ``assemble`` reads. A run is refused before a model is loaded if no row of the
        source has such a column. For data form ``prompts`` only. Default: those of the advantages."""
        return [name for part in self.parts.values() if isinstance(part, Advantage) for name in part.columns()]

    @abstractmethod
    def assemble(self, examples: Sequence[Examples]) -> tuple[Batch | None, dict[str, float]]:
        """The batch of a step, and metrics about it (how many rows were left out).

        A batch of None means that there is nothing to learn from: the step is counted as empty, and the other methods
        are not called for it. Only the snapshots of ``updates(step)`` are taken.

        A sample with an empty answer is a unit too. It has no token under ``loss_mask``, but its reward counts in its
        group. ``credit`` and the losses must handle it.

        Args:
            examples: scored groups if ``data`` is ``prompts``, else tokenised rows.
        """

    def annotations(self, step: int) -> list[Annotation]:
        """The columns that models add to the batch before ``credit``."""
        return []

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with the columns that the losses need (advantages from rewards), and metrics about them. Default:
        the unchanged batch."""
        return batch, {}

    def updates(self, step: int, batch: Batch | None = None) -> Sequence[Update | Snapshot]:
        """What is trained in step ``step`` (from 0), in order. Default: one optimizer step of the policy on the whole
        batch, by the loss in the slot ``loss``.

        Args:
            batch: the result of ``credit``. None before the run: the runtime then calls this for every step and plans
                the learning rates from the number of optimizer steps. Answer for a full batch. A smaller batch may have
                fewer minibatches; the learning-rate schedule goes on as planned.
        """
        return [Update("policy", "loss")]

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Called after the updates of a step: adapt coefficients. Returns further metrics.

        Args:
            batch: the result of ``assemble``.
            metrics: of the step, including those of the updates.
        """
        return {}

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Called after an evaluation, with its metrics (``eval/...``)."""
        return

    def model_config(self) -> dict[str, Any]:
        """JSON values for the ``config.json`` of every model that the run exports (the mean and standard deviation of a
        reward model)."""
        return {}
