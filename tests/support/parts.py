"""Parts of a run for tests that need some advantage or some ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rlhf.interfaces import Advantage, WorkerGroup
from rlhf.ops.groups import group_center
from rlhf.ops.returns import return_to_go


class Centered(Advantage):
    """The complete example of the interface."""

    name = "centered"
    group_min = 2

    def baseline(self, r_N, group_N):
        return group_center(r_N, group_N)

    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        adv_NA = return_to_go(R_NA, mask_NA, gamma=1.0)
        return adv_NA, adv_NA


class RanksHere(WorkerGroup):
    """Ranks in this process."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers, self.size = workers, len(workers)

    def call(self, method: str, per_rank: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(w, method)(*a) for w, a in zip(self.workers, per_rank, strict=True)]

    def stream(self, method: str, *arguments: Any, timeout: float | None = None) -> Iterator[Any]:
        first, *rest = [list(getattr(w, method)(*arguments)) for w in self.workers]
        assert not any(rest)
        return iter(first)
