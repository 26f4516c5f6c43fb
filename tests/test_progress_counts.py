"""How far the phases of a step are, in whole runs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rlhf_runtime.observe.progress import Progress

from tests.continuous import simulated
from tests.runs import Workshop


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The calls of :meth:`Progress.count`, which only a terminal shows."""
    calls: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Progress, "count", lambda self, *count: calls.append(count))
    return calls


def of(counts: list[tuple[str, int, int]], unit: str) -> list[tuple[int, int]]:
    return [(done, total) for name, done, total in counts if name == unit]


def test_samples_optimizer_steps_and_micro_batches_are_counted(
    shop: Workshop, counts: list[tuple[str, int, int]]
) -> None:
    shop.train(
        "ppo",
        "run",
        run={"steps": 1},
        algorithm={"minibatches": 2},
        policy={"micro_tokens": 24},
        data={"eval": [{"path": str(shop.data), "max_rows": 2}]},
    )
    training = [(count, 12) for count in range(1, 13)]  # 4 prompts x 3 samples
    answered = [(count, 2) for count in (1, 2)]
    assert of(counts, "samples") == training + answered
    assert of(counts, "optimizer step") == [(1, 2), (2, 2)] * 2, "of the critic and of the policy"
    micros = of(counts, "micro-batches")
    assert max(total for _, total in micros) > 2
    assert micros[0][0] == 1
    assert micros[-1][0] == micros[-1][1]
    assert all(new == old + 1 or (old == total and new == 1) for (old, total), (new, _) in pairwise(micros))


def test_a_continuous_stream_counts_the_groups_that_a_step_waits_for(
    shop: Workshop, counts: list[tuple[str, int, int]]
) -> None:
    config = simulated(shop, "run", run={"steps": 2})
    shop.train_config(config)
    groups = of(counts, "groups")
    assert groups
    assert all(0 <= scored <= total == config["data"]["batch_size"] for scored, total in groups)
