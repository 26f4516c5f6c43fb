"""Common base of learning from given and from sampled pairs: roles, the reference's snapshots, the running shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm, ComponentConfig, Loss, Slot
from rlhf.types import Annotation, Needs, RoleSpec, RunOptions, Snapshot, Update
from rlhf_algorithms.snapshots import SnapshotConfig, snapshots_due

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch


class Pairwise(Algorithm):
    """Trains the policy on units of two answers, role 0 chosen and role 1 rejected.

    Any loss over pairs fits the slot. There is a reference if the loss reads ``ref_logprobs``.
    """

    Config = SnapshotConfig
    slots = {"loss": Slot("loss", "dpo")}

    def __init__(
        self,
        config: ComponentConfig | None = None,
        parts: Mapping[str, Any] | None = None,
        run: RunOptions | None = None,
    ) -> None:
        super().__init__(config, parts, run)
        self.loss: Loss = self.parts["loss"]
        self._shift, self._rewards = 0.0, 0
        """The running mean of rewards, which ``bco_pair`` subtracts, and the number of rewards in it."""
        if self.config.snapshot_every is not None and not self.reads_reference:
            raise ConfigError(
                f"algorithm.snapshot_every = {self.config.snapshot_every} copies the policy to the reference, which "
                f"the loss {self.loss.name!r} configured like this does not read; leave it out, or use a reference"
            )

    @property
    def reads_reference(self) -> bool:
        return "ref_logprobs" in self.loss.columns()

    @property
    def _running(self) -> bool:
        return getattr(self.loss.config, "bco_shift", "none") == "running"

    def needs(self) -> Needs:
        reference = (RoleSpec("reference", like="policy"),) if self.reads_reference else ()
        return Needs((RoleSpec("policy", trained=True), *reference))

    def annotations(self, step: int) -> list[Annotation]:
        return [Annotation("reference", "logprobs", "ref_logprobs")] if self.reads_reference else []

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        """The update and, when it is due, the snapshot. The snapshot comes last: the ``ref_logprobs`` of the next step
        are the new reference's."""
        config = self.config
        return [self.update(batch), *snapshots_due(config.snapshot_every, config.snapshot_share, step)]

    def update(self, batch: Batch | None) -> Update:
        return Update("policy", "loss", coef=self.coef())

    def coef(self) -> dict[str, float]:
        return {"bco_shift": self._shift} if self._running else {}

    def finish(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> dict[str, float]:
        """Add the step's rewards to the running mean. The loss reads the mean of earlier steps."""
        if not self._running:
            return {}
        used = self._shift
        if "policy/chosen_reward" in metrics:  # absent where the only update was skipped
            mean = (metrics["policy/chosen_reward"] + metrics["policy/rejected_reward"]) / 2
            self._rewards += 2 * batch.units
            self._shift += (mean - self._shift) * 2 * batch.units / self._rewards
        return {"bco_shift": used}

    def state_dict(self) -> dict[str, Any]:
        return {"shift": self._shift, "rewards": self._rewards} if self._running else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._running:
            self._shift, self._rewards = float(state["shift"]), int(state["rewards"])
        else:
            super().load_state_dict(state)
