"""What a rank prints before NCCL would end its process. There is no NCCL here: a wait on an event stands in."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.sharded import process_group
from rlhf_modeling.sharded.process_group import collective

SPEC = ModelSpec(RoleSpec("critic", trained=True), "m", rank=1, world_size=4)


class Written:
    """A standard error that says when something is written."""

    def __init__(self) -> None:
        self.text, self.changed = "", threading.Event()

    def write(self, text: str) -> int:
        self.text += text
        self.changed.set()
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


def watched_errors(monkeypatch):
    """Called in the test itself, because pytest sets standard error between its phases."""
    monkeypatch.setattr(process_group, "ends_process", lambda: True)
    stream = Written()
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_a_stand_in_for_a_hang_under_nccl_prints_role_rank_call_and_stack(monkeypatch):
    errors = watched_errors(monkeypatch)

    def exchange_that_hangs():
        assert errors.changed.wait(60)

    with collective(SPEC, "accumulate", 0.2):
        exchange_that_hangs()
    assert "role 'critic', rank 1 of 4: accumulate() has made no progress" in errors.text
    assert "trainer.timeout (0.2 s)" in errors.text
    assert "in exchange_that_hangs" in errors.text


def test_a_stand_in_for_ranks_that_go_on_prints_nothing(monkeypatch):
    """The thread stays at one place, but exchanges begin."""
    errors = watched_errors(monkeypatch)
    begun = iter(range(10**9))

    class Group:
        def _get_sequence_number_for_group(self) -> int:
            return next(begun)

    monkeypatch.setattr(process_group, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=Group())))
    with collective(SPEC, "accumulate", 0.05):
        while next(begun) < 100:
            time.sleep(0.05)
    assert errors.text == ""


@pytest.mark.parametrize(("ranks", "nccl"), [(1, True), (4, False)])
def test_one_rank_and_gloo_are_not_watched(ranks, nccl, monkeypatch):
    monkeypatch.setattr(process_group, "ends_process", lambda: nccl)
    spec = ModelSpec(RoleSpec("critic", trained=True), "m", world_size=ranks)
    threads = set(threading.enumerate())  # of earlier tests, which may still end
    with collective(spec, "accumulate", 0.05):
        assert set(threading.enumerate()) <= threads
