"""How many groups may be started, and which of them a batch takes."""

from __future__ import annotations

import json
import random
from array import array

import pytest
from rlhf.types import GenerationRequest, Group, Row, Sampling, Trajectory, Turn
from rlhf_runtime.samples.pending_groups import Pending, PendingGroups, oldest_version
from rlhf_runtime.samples.sample_context import TurnLog

ROW = Row({"prompt": "1+1="}, "unit", 7)


def groups(*, batch_size: int = 4, staleness: int = 1, order: str = "submission", oversample: float | None = None):
    return PendingGroups(batch_size, 10, staleness, order, oversample)


def add(pending: PendingGroups, number: int, version: int = 0, finished: int = 0) -> None:
    """``finished``: position in the order of completion; 0: the group is not scored yet."""
    group = Group(ROW, number, []) if finished else None
    pending.add(Pending(number, ROW, version, [], group, finished))


def score(pending: PendingGroups, number: int, finished: int) -> None:
    entry = next(entry for entry in pending if entry.number == number)
    pending.scored(entry, Group(ROW, number, []), finished)


def numbers(chosen: list[Pending] | None) -> list[int] | None:
    return None if chosen is None else [pending.number for pending in chosen]


# ------------------------------------------------------------------------------------------- room


@pytest.mark.parametrize(
    ("staleness", "step", "version", "room"),
    [
        (0, 0, 0, 4),  # the batch of step 0
        (0, 1, 0, 0),  # step 0 learns: groups of version 0 would be too old for step 1
        (0, 1, 1, 4),
        (1, 0, 0, 8),  # the batches of steps 0 and 1
        (1, 1, 0, 4),  # step 0 learns: the batch of step 1
        (1, 1, 1, 8),
        (2, 0, 0, 12),
        (2, 1, 0, 8),
        (2, 2, 0, 4),
        (2, 3, 0, 0),
        (2, 4, 0, 0),  # below zero
        (2, 8, 8, 8),  # 10 steps: only those of 8 and 9 are left
        (2, 9, 9, 4),
        (2, 10, 10, 0),
        (0, 10, 10, 0),
    ],
)
def test_room_is_what_the_steps_within_the_limit_can_train_on(staleness, step, version, room):
    assert groups(staleness=staleness).room(step, version) == room


def test_pending_groups_take_room():
    pending = groups()
    for number in range(5):
        add(pending, number, finished=number % 2)
    assert (len(pending), pending.running) == (5, 3)
    assert pending.room(0, 0) == 3
    assert pending.room(1, 0) == 0, "room for 4, and 5 are pending"


@pytest.mark.parametrize(
    ("batch_size", "oversample", "step", "version", "room"),
    [
        (4, 1.0, 0, 0, 4),
        (4, 1.3, 0, 0, 6),  # 5.2, rounded up
        (3, 1.5, 0, 0, 5),  # 4.5, rounded up
        (4, 2.0, 0, 0, 8),
        (4, 3.0, 0, 0, 8),  # staleness 1 allows two batches
        (4, 1.3, 1, 0, 4),  # and one while the policy learns
        (4, 1.3, 9, 9, 4),  # the last step
    ],
)
def test_oversample_limits_the_room(batch_size, oversample, step, version, room):
    assert groups(batch_size=batch_size, oversample=oversample).room(step, version) == room


# ----------------------------------------------------------------------------------------- choose


def test_completion_takes_groups_at_their_deadline_first():
    """With staleness 1, step 1 is the last one for groups of version 0."""
    pending = groups(batch_size=2, order="completion")
    add(pending, 0, version=0)
    add(pending, 1, version=1, finished=1)
    add(pending, 2, version=1, finished=2)
    assert numbers(pending.choose(0)) == [1, 2]
    assert pending.choose(1) is None, "group 0 is at its deadline and not scored"
    score(pending, 0, finished=3)
    assert numbers(pending.choose(1)) == [0, 1]


def test_completion_takes_old_groups_before_their_deadline_if_later_steps_have_no_room_for_them():
    """Groups 0 and 1 must be in the batches of steps 1 and 2, so group 2 must not be in one of them."""
    pending = groups(batch_size=1, staleness=2, order="completion")
    for number, version in enumerate((0, 0, 1)):
        add(pending, number, version)
    score(pending, 2, finished=1)
    assert pending.choose(1) is None
    score(pending, 1, finished=2)
    assert numbers(pending.choose(1)) == [1]


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_no_group_misses_its_deadline(order):
    for seed in range(30):
        run_to_the_end(order, random.Random(seed))


def run_to_the_end(order: str, draw: random.Random) -> None:
    size, staleness = draw.randint(1, 4), draw.randint(0, 3)
    pending = groups(batch_size=size, staleness=staleness, order=order, oversample=draw.choice([None, 1.0, 1.5]))
    started = finished = step = 0
    while step < 10:
        for _ in range(pending.room(step, version=step)):
            add(pending, started, version=step)
            started += 1
        chosen = pending.choose(step)
        if chosen is not None:
            assert all(step - staleness <= entry.version for entry in chosen)
            for entry in chosen:
                pending.remove(entry)
            step += 1
            continue
        entry = [entry for entry in pending if entry.group is None][draw.choice([0, -1, -1, -1])]  # the oldest are slow
        if draw.random() < 0.2:
            pending.remove(entry)  # rejected
        else:
            finished += 1
            score(pending, entry.number, finished)


def plainly_chosen(pending: PendingGroups, step: int) -> list[int] | None:
    """What :meth:`PendingGroups.choose` promises, without anything that is counted along the way."""
    every, size = list(pending), pending.batch_size
    if pending.order == "submission":
        chosen = every[:size]
    else:
        chosen, rest = [], sorted((e for e in every if e.group is not None), key=lambda entry: entry.finished)
        for deadline in sorted({entry.version + pending.staleness for entry in every}):
            old = [entry for entry in every if entry.version + pending.staleness <= deadline]
            quota = min(size, len(old) - size * max(0, deadline - step))
            while len(chosen) < quota:
                first = next((entry for entry in rest if entry in old and entry not in chosen), None)
                if first is None:
                    return None
                chosen.append(first)
        chosen += [entry for entry in rest if entry not in chosen][: size - len(chosen)]
        chosen.sort(key=lambda entry: entry.number)
    if len(chosen) < size or any(entry.group is None for entry in chosen):
        return None
    return [entry.number for entry in chosen]


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_whatever_happens_the_choice_is_that_of_all_groups_looked_at(order):
    for seed in range(20):
        choose_at_every_event(order, random.Random(seed))


def choose_at_every_event(order: str, draw: random.Random) -> None:
    pending = groups(batch_size=draw.randint(1, 4), staleness=draw.randint(0, 2), order=order)
    started = finished = step = batches = 0
    for _ in range(400):
        every = list(pending)
        happens = draw.choice(["start", "start", "score", "score", "reject", "too old", "restored", "next step"])
        running = [entry for entry in every if entry.group is None]
        scored = [entry for entry in every if entry.group is not None]
        if happens in ("start", "restored") and len(every) < 12:
            finished += happens == "restored"
            add(pending, started, version=step, finished=finished if happens == "restored" else 0)
            started += 1
        elif happens == "score" and running:
            finished += 1
            score(pending, draw.choice(running).number, finished)
        elif happens == "reject" and running:
            pending.remove(draw.choice(running))
        elif happens == "too old" and scored:
            pending.remove(draw.choice(scored))
        elif happens == "next step" and step < 9:
            step += 1
        assert pending.running == sum(entry.group is None for entry in pending)
        chosen = pending.choose(step)
        assert numbers(chosen) == plainly_chosen(pending, step)
        if chosen is not None and draw.random() < 0.5:
            batches += 1
            for entry in chosen:
                pending.remove(entry)
    assert batches > 5


# ------------------------------------------------------------------------------------------ saved


def sampled(*ids: int) -> Turn:
    return Turn(array("i", ids), True, [-1.0] * len(ids), ((0, 3),), "stop")


def test_the_turns_of_an_unfinished_group_are_saved_with_their_contexts():
    request = GenerationRequest(array("i", [5, 6]), 1, Sampling())
    logs = [TurnLog(), TurnLog()]
    logs[0].add(0, request, sampled(8, 9))
    original = Pending(4, ROW, 3, logs)
    state, group = original.saved()
    assert [len(trajectory.turns) for trajectory in group.trajectories] == [1, 0]
    assert [trajectory.index for trajectory in group.trajectories] == [(4, 0), (4, 1)]
    after = Pending.restored(json.loads(json.dumps(state)), group)
    assert (after.number, after.version, after.group, after.finished) == (4, 3, None, 0)
    assert after.logs[0].find(0, request) == sampled(8, 9)
    assert after.logs[1].find(0, request) is None


def test_a_scored_group_is_saved_whole():
    group = Group(ROW, 4, [Trajectory(ROW, [sampled(8)], (4, 0))])
    state, saved = Pending(4, ROW, 3, [TurnLog()], group, 6).saved()
    assert saved is group
    after = Pending.restored(json.loads(json.dumps(state)), group)
    assert (after.number, after.version, after.group, after.finished) == (4, 3, group, 6)


def test_the_oldest_version_is_that_of_sampled_tokens():
    prompt = Turn(array("i", [1]), False)
    mixed = Turn(array("i", [1, 2]), True, [-1.0] * 2, ((0, 5), (1, 6)), "stop")
    group = Group(ROW, 0, [Trajectory(ROW, [prompt, mixed], (0, 0)), Trajectory(ROW, [prompt, sampled(1)], (0, 1))])
    assert oldest_version(group) == 3
    assert oldest_version(Group(ROW, 0, [Trajectory(ROW, [prompt], (0, 0))])) is None
