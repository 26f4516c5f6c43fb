"""How many dead engines are replaced. Their processes are stand-ins; `suite_engines.py` kills real ones."""

from types import SimpleNamespace

import pytest
from rlhf.errors import WorkerError
from rlhf_workers.engines import pool


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds)
    monkeypatch.setattr(pool, "time", clock)
    return clock


def engine_workers(engines: int, max_restarts: int | None) -> pool.EngineWorkers:
    def start(numbers):
        return [SimpleNamespace(kill=lambda: None) for _ in numbers]

    return pool.EngineWorkers(None, start, None, engines, max_restarts)


def die(workers: pool.EngineWorkers, *numbers: int) -> list[int]:
    for number in numbers:
        workers.record_death(number, WorkerError(f"engine {number} died"))
    return workers.replace()


def test_replacements_are_counted_within_an_hour(clock):
    workers = engine_workers(engines=2, max_restarts=2)
    for hour in range(10):
        clock.seconds = 3601.0 * hour
        assert die(workers, 0, 1) == [0, 1]
    clock.seconds += 3599.0
    with pytest.raises(
        WorkerError, match=r"engine 1 died\nThe run stops: 2 engines .* in the last hour, and 2 are allowed"
    ):
        die(workers, 1)


@pytest.mark.parametrize(("engines", "allowed"), [(1, 3), (8, 8)])
def test_by_default_all_engines_may_be_replaced_once_an_hour_and_three_at_least(clock, engines, allowed):
    workers = engine_workers(engines, max_restarts=None)
    for number in range(allowed):
        die(workers, number % engines)
    with pytest.raises(WorkerError, match=f"{allowed} engines were already replaced"):
        die(workers, 0)
