"""The planned training: the number of optimizer steps of each role in each step of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rlhf.interfaces import Algorithm
from rlhf.types import Update

from rlhf_runtime.calls.algorithm_calls import ask


@dataclass(frozen=True)
class UpdateSchedule:
    """The results of ``Algorithm.updates`` for every step of the run, computed before the first step."""

    planned: tuple[Mapping[str, int], ...] = ()
    """For each step of the run: {role: optimizer steps}."""
    snapshots: frozenset[str] = frozenset()
    """Roles whose weights the algorithm overwrites with another role's weights. Checkpoints contain them, as they
    contain trained roles."""
    sources: frozenset[str] = frozenset()
    """Roles whose weights are read for snapshots."""

    @classmethod
    def of(cls, algorithm: Algorithm, steps: int) -> UpdateSchedule:
        """Ask the algorithm for each of ``steps`` steps."""
        planned: list[Mapping[str, int]] = []
        different: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}  # equal steps share one object
        snapshots, sources = set(), set()
        for step in range(steps):
            count: Counter[str] = Counter()
            for update in ask(algorithm, "updates", step):
                if isinstance(update, Update):
                    count[update.role] += update.epochs * update.minibatches
                else:
                    snapshots.add(update.role)
                    # A mixture also reads the weights that it replaces.
                    sources |= {update.source} | ({update.role} if update.share < 1 else set())
            planned.append(different.setdefault(tuple(count.items()), dict(count)))
        return cls(tuple(planned), frozenset(snapshots), frozenset(sources))

    def total(self) -> Counter[str]:
        """{role: optimizer steps of the whole run}: the length of its learning-rate schedule."""
        total: Counter[str] = Counter()
        for count in self.planned:
            total.update(count)
        return total


def due(steps_done: int, every: int | None) -> bool:
    """Whether something that happens after ``every`` steps, or never if None, happens after step ``steps_done``."""
    return every is not None and steps_done % every == 0
