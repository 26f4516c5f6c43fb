"""A reference that becomes a copy of the policy every so many steps (TR-DPO, arXiv:2404.09656)."""

from __future__ import annotations

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig
from rlhf.types import Snapshot


class SnapshotConfig(ComponentConfig):
    """The options of an algorithm whose reference may follow the policy."""

    snapshot_every: int | None = Field(default=None, ge=1)
    """Number of steps after which the reference becomes a copy of the policy. Default: never."""
    snapshot_share: float = Field(default=1.0, gt=0, le=1)
    """With ``snapshot_every``: the policy's share in the new reference (arXiv:2404.09656); the rest is the old
    reference's."""

    @model_validator(mode="after")
    def _read(self) -> SnapshotConfig:
        require_every(self.snapshot_every, self.snapshot_share)
        return self


def require_every(every: int | None, share: float) -> None:
    """Raise ValueError if ``snapshot_share`` is set but ``snapshot_every`` is not."""
    if share < 1 and every is None:
        raise ValueError(
            f"snapshot_share = {share:g} is used every snapshot_every steps, but snapshot_every is not set: set it, or "
            "remove snapshot_share"
        )


def snapshots_due(every: int | None, share: float, step: int) -> list[Snapshot]:
    """The snapshot after the updates of ``step``, counted from 0. Empty if none is due."""
    due = every is not None and (step + 1) % every == 0
    return [Snapshot("reference", "policy", share)] if due else []
