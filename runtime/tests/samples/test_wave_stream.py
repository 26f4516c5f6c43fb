"""Staleness is exact, filters refill exactly the missing groups, and a stream resumes with its ready batches."""

import json
from dataclasses import replace

import pytest
from rlhf.errors import TrainingError
from rlhf.interfaces import FinishedGroup
from rlhf.types import Group, Row, Sampling, Trajectory, Turn
from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.samples.acceptance import Acceptance, passes
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.stream import WaveStream


class Counting:
    """Rows 0, 1, 2, ... for ever."""

    curriculum = None

    def __init__(self):
        self.next = 0

    def take(self, n, step):
        rows = [Row({"id": i}, "s", i) for i in range(self.next, self.next + n)]
        self.next += n
        return rows

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Versioned:
    version = 0


class Recorded:
    """Replaces the rollouts: computes scores from rows and records every call."""

    def __init__(self, score=lambda i: 0.5, fails=lambda i, s: False):
        self.generator, self.calls = Versioned(), []
        self.score, self.fails = score, fails

    def run(self, rows, first_number, settings, count):
        self.calls.append((self.generator.version, [r.index for r in rows], first_number))
        groups = []
        for n, row in enumerate(rows):
            trajectories = []
            for s in range(2):
                t = Trajectory(row, [Turn([1], False), Turn([2], True, [-1.0])], (first_number + n, s))
                t.reward = t.score = float(self.score(row.index))
                if self.fails(row.index, s):
                    t.status, t.reward, t.error = "failed", None, "broke"
                trajectories.append(t)
            groups.append(Group(row, first_number + n, trajectories))
        return groups


def stream(rollouts, **changes):
    settings = RolloutSettings(Sampling(), 2, "sample", 0, 10, 1.0)
    rules = {
        name: changes.pop(name) for name in ("filter", "on_failed_sample", "group_min", "scored") if name in changes
    }
    options = {"batch_size": 4, "total_steps": 6, **changes}
    return WaveStream(Counting(), rollouts, settings, acceptance=Acceptance(**rules), **options)


def first_batch(s):
    s.start(0)
    return s.take(0)


@pytest.mark.parametrize("staleness", [0, 1, 2, 10])
def test_batch_k_is_generated_with_version_max_0_k_minus_s(staleness):
    rollouts = Recorded()
    s = stream(rollouts, staleness=staleness)
    versions = []
    for step in range(6):
        s.start(step)
        versions.append(s.take(step).version)
        rollouts.generator.version = step + 1  # the update and the sync
    assert versions == [max(0, k - staleness) for k in range(6)]
    assert s.generated == 6, "nothing is generated beyond the last step"


def test_a_batch_can_be_taken_for_its_own_step_only():
    s = stream(Recorded(), staleness=1)
    with pytest.raises(TrainingError, match=r"step 0 was requested, but no batch is ready; call start\(0\)"):
        s.take(0)
    s.start(0)
    with pytest.raises(TrainingError, match="step 1 was requested, but the oldest batch that is ready is of step 0"):
        s.take(1)
    s.take(0)
    with pytest.raises(TrainingError, match="step 0 was requested, but the oldest batch that is ready is of step 1"):
        s.take(0)
    assert [g.number for g in s.take(1).groups] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("round", "versions", "calls"),
    [
        (1, [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]),
        (2, [0, 0, 2, 2, 4, 4], [2, 2, 4, 4, 6, 6]),
        (4, [0, 0, 0, 0, 4, 4], [4, 4, 4, 4, 6, 6]),
        (9, [0, 0, 0, 0, 0, 0], [6, 6, 6, 6, 6, 6]),
    ],
)
def test_a_round_is_generated_at_its_first_step_with_the_weights_of_that_step(round, versions, calls):
    rollouts = Recorded()
    s = stream(rollouts, round=round)
    batches, generated = [], []
    for step in range(6):
        s.start(step)
        batches.append(s.take(step))
        generated.append(len(rollouts.calls))
        if s.samples_with(step + 1):  # weights that no samples are drawn with are not sent
            rollouts.generator.version = step + 1
    assert [ready.version for ready in batches] == versions == [round * (k // round) for k in range(6)]
    assert generated == calls, "nothing is generated inside a round or beyond the last step"
    assert [g.number for ready in batches for g in ready.groups] == list(range(24))


def test_a_resume_inside_a_round_uses_the_samples_generated_before():
    rollouts = Recorded()
    s = stream(rollouts, round=3)
    first_batch(s)
    saved, groups = s.snapshot()
    again_rollouts = Recorded()
    second = stream(again_rollouts, round=3)
    second.restore(saved, groups)
    again_rollouts.generator.version = 1  # a start sends the current weights to the generator, even inside a round
    batches = []
    for step in range(1, 6):
        second.start(step)
        batches.append(second.take(step))
        again_rollouts.generator.version = step + 1
    assert [(b.version, b.groups[0].number) for b in batches] == [(0, 4), (0, 8), (3, 12), (3, 16), (3, 20)]
    assert [version for version, _, _ in again_rollouts.calls] == [3, 3, 3], "the round's batches are not drawn again"


@pytest.mark.parametrize(
    ("options", "done", "versions"),
    [
        ({"staleness": 2}, 6, [6, 6, 6, 7, 8, 9]),
        ({"staleness": 2}, 5, [3, 5, 5, 6, 7, 8, 9]),
        ({"round": 4}, 6, [6, 6, 8, 8, 8, 8]),
        ({"round": 3}, 6, [6, 6, 6, 9, 9, 9]),
    ],
)
def test_a_resume_with_more_steps_generates_the_batches_that_are_already_due(options, done, versions):
    """The weights defined for the first additional batches no longer exist: the weights at the resume replace them."""
    rollouts = Recorded()
    s = stream(rollouts, **options)
    for step in range(done):
        s.start(step)
        s.take(step)
        rollouts.generator.version = step + 1
    saved, groups = s.snapshot()
    longer = stream(rollouts, **options, total_steps=12)
    longer.restore(saved, groups)
    batches = []
    for step in range(done, 12):
        longer.start(step)
        batches.append(longer.take(step))
        rollouts.generator.version = step + 1
    assert [b.version for b in batches] == versions
    assert all(longer.samples_with(version) for version in versions), "an evaluation with other weights ends with these"
    assert [g.number for b in batches for g in b.groups] == list(range(4 * done, 48)), (
        "no prompt is skipped or repeated"
    )


def test_a_generator_with_the_wrong_weights_is_an_error():
    rollouts = Recorded()
    s = stream(rollouts)
    first_batch(s)
    with pytest.raises(TrainingError, match=r"must be generated with weight version 1 .* holds version 0"):
        s.start(1)


def test_rejected_groups_are_replaced_and_accepted_groups_are_kept():
    rollouts = Recorded(score=lambda i: [0, 1, 0.5][i % 3])
    ready = first_batch(stream(rollouts, filter=FilterSection(low=0.0, high=1.0)))
    assert [g.row.index for g in ready.groups] == [2, 5, 8, 11]
    assert [len(rows) for _, rows, _ in rollouts.calls] == [4, 3, 2, 1, 1, 1], "asks for exactly what is missing"
    assert ready.counts["prompts"] == 12
    assert ready.counts["filtered"] == 8
    assert ready.counts["short"] == 0


def test_a_filter_that_never_fills_the_batch_leaves_a_short_batch():
    ready = first_batch(
        stream(Recorded(score=lambda i: float(i == 0) / 2), filter=FilterSection(low=0.1, max_rounds=3))
    )
    assert [g.row.index for g in ready.groups] == [0]
    assert ready.counts["short"] == 3


def test_given_answers_are_not_filtered_and_are_counted():
    class Mixed(Recorded):
        def run(self, rows, first_number, settings, count):
            groups = super().run(rows, first_number, settings, count)
            for group in groups:
                if group.row.index in (1, 6):
                    answer = Turn([2], True, is_demonstration=True)
                    group.trajectories = [Trajectory(group.row, [Turn([1], False), answer], (group.number, 0))]
            return groups

    s = stream(Mixed(score=lambda i: float(i == 3)), filter=FilterSection(low=0.1, max_rounds=2), group_min=2)
    s.settings = replace(s.settings, demonstration_share=0.5)
    ready = first_batch(s)
    assert [g.row.index for g in ready.groups] == [1, 3, 6]
    assert (ready.counts["demonstrations"], ready.counts["filtered"], ready.counts["short"]) == (2, 5, 1)


@pytest.mark.parametrize(
    ("rules", "rows", "samples"),
    [
        ({"on_failed_sample": "drop_sample"}, [0, 1, 2, 3], [2, 1, 2, 2]),
        ({"on_failed_sample": "drop_group"}, [0, 2, 3, 4], [2, 2, 2, 2]),
        ({"on_failed_sample": "drop_sample", "group_min": 2}, [0, 2, 3, 4], [2, 2, 2, 2]),
    ],
)
def test_failed_samples_are_dropped_alone_or_their_group_is_replaced(rules, rows, samples):
    ready = first_batch(stream(Recorded(fails=lambda i, s: (i, s) == (1, 0)), **rules))
    assert [g.row.index for g in ready.groups] == rows
    assert [len(g.trajectories) for g in ready.groups] == samples
    replaced = max(rows) - 3
    assert (ready.counts["failed_samples"], ready.counts["failed_groups"]) == (1, replaced)
    assert (ready.counts["prompts"], ready.counts["short"]) == (4 + replaced, 0)


def test_without_a_filter_failed_groups_are_replaced_for_twenty_rounds():
    rollouts = Recorded(fails=lambda i, s: True)
    ready = first_batch(stream(rollouts, on_failed_sample="drop_group"))
    assert len(rollouts.calls) == 1 + 20
    assert (ready.groups, ready.counts["short"], ready.counts["failed_groups"]) == ([], 4, 84)


def test_ready_batches_come_back_after_a_resume():
    rollouts = Recorded()
    s = stream(rollouts, staleness=2)
    first_batch(s)
    saved, groups = s.snapshot()
    again_rollouts = Recorded()
    second = stream(again_rollouts, staleness=2)
    second.restore(saved, groups)
    for instance, source in ((s, rollouts), (second, again_rollouts)):
        source.generator.version = 1
        instance.start(1)
    assert [(b.version, [g.number for g in b.groups], b.counts) for b in second.ready] == [
        (b.version, [g.number for g in b.groups], b.counts) for b in s.ready
    ]
    assert second.ready[0].counts["prompts"] == 4
    assert again_rollouts.calls == rollouts.calls[3:], "nothing is generated twice"


@pytest.mark.parametrize(
    ("filter", "scores", "passed"),
    [
        ({"low": 0.0, "high": 1.0}, [0, 0], False),
        ({"low": 0.0, "high": 1.0}, [1, 1], False),
        ({"low": 0.0, "high": 1.0}, [0, 1], True),
        ({"min_std": 0.0}, [0.3, 0.3], False),
        ({"min_std": 0.0}, [0.1, 0.1, 0.1], False),  # in floating point 0.1 + 0.1 + 0.1 != 3 * 0.1
        ({"low": 0.1}, [0.1, 0.1, 0.1], False),
        ({"min_std": 0.0}, [0.3, 0.4], True),
        ({"low": 0.0}, [], False),
        ({"low": 0.25}, [0.0, 0.5], False),  # a mean of exactly 0.25
        ({"low": 0.24}, [0.0, 0.5], True),
        ({"high": 0.25}, [0.0, 0.5], False),
        ({"high": 0.26}, [0.0, 0.5], True),
        ({"high": 0.5}, [], False),
        ({"min_std": 0.5}, [0, 1], False),  # population std: exactly 0.5; sample std: 0.71
        ({"min_std": 0.49}, [0, 1], True),
        ({"min_std": 0.25}, [1.0, 1.5, 1.0, 1.5], False),
        ({"min_std": 0.24}, [1.0, 1.5, 1.0, 1.5], True),
        ({"low": 0.0, "min_std": 0.3}, [0.5, 1.0], False),  # every condition must hold
    ],
)
def test_the_bounds_of_the_filter_are_strict(filter, scores, passed):
    assert passes(FilterSection(**filter), scores) is passed


class Unscored(Recorded):
    """Samples without rewards."""

    def run(self, rows, first_number, settings, count):
        groups = super().run(rows, first_number, settings, count)
        for trajectory in (t for g in groups for t in g.trajectories):
            trajectory.reward = trajectory.score = None
        return groups


def test_samples_without_a_reward_reach_an_algorithm_that_needs_none():
    ready = first_batch(
        stream(Unscored(fails=lambda i, s: i == 1 and s == 0), scored=False, on_failed_sample="drop_sample")
    )
    assert [len(g.trajectories) for g in ready.groups] == [2, 1, 2, 2]
    assert ready.counts["failed_samples"] == 1
    left_out = stream(Unscored(), on_failed_sample="drop_sample")
    assert first_batch(left_out).groups == []


class Knowing:
    """A curriculum's order: keeps what is known when the rows of each batch are chosen."""

    def __init__(self):
        self.told, self.knew = [], {}

    def finished_group(self, group, step, outcome):
        scores = tuple(t.score for t in group.trajectories)
        return FinishedGroup(group.row.index, group.number, step, scores, outcome)

    def tell(self, groups):
        self.told += groups

    def metrics(self):
        return {"curriculum/told": float(len(self.told))}

    def restored(self, saved):
        return [FinishedGroup(**{**g, "scores": tuple(g["scores"])}) for g in saved]


class Asking(Counting):
    """Rows for which the curriculum is asked."""

    def __init__(self, knowing):
        super().__init__()
        self.curriculum = knowing

    def take(self, n, step):
        self.curriculum.knew.setdefault(step, []).append([(g.step, g.row) for g in self.curriculum.told])
        return super().take(n, step)


def with_curriculum(rollouts, **changes):
    knowing = Knowing()
    source = stream(rollouts, **changes)
    source.rows = Asking(knowing)
    return source, knowing


def go(s, first, last):
    for step in range(first, last):
        s.rollouts.generator.version = step if s.samples_with(step) else s.rollouts.generator.version
        s.start(step)
        yield s.take(step)


@pytest.mark.parametrize(("staleness", "round"), [(0, 1), (1, 1), (2, 1), (9, 1), (0, 2), (0, 4)])
def test_a_curriculum_knows_exactly_the_batches_that_the_weights_have_learnt_from(staleness, round):
    rollouts = Recorded(score=lambda i: i % 3)
    s, knowing = with_curriculum(rollouts, staleness=staleness, round=round, filter=FilterSection(low=0.5))
    batches = list(go(s, 0, 6))
    assert any(len(calls) > 1 for calls in knowing.knew.values()), "batches are refilled"
    for k, batch in enumerate(batches):
        version = max(0, k - staleness) if round == 1 else round * (k // round)
        for outcomes in knowing.knew[k]:  # the refills of a batch know no more than its first rows
            assert sorted({step for step, _ in outcomes}) == list(range(version)), f"batch {k}"
        assert [g.outcome for g in batch.finished] == [
            "filtered" if g.row % 3 == 0 else "kept" for g in batch.finished
        ], "every group that was drawn, in order"
        assert {g.step for g in batch.finished} == {k}
    rows = [g.row for batch in batches for g in batch.finished]
    assert rows == list(range(len(rows))), "each row is told once, and none is lost"


def test_what_became_of_ready_batches_is_in_the_state():
    def fresh():
        return with_curriculum(Recorded(score=lambda i: i % 3), staleness=2, filter=FilterSection(low=0.5))

    reference, _ = fresh()
    expected = list(go(reference, 0, 6))
    first, old_curriculum = fresh()
    done = list(go(first, 0, 2))
    state, groups = first.snapshot()
    state = json.loads(json.dumps(state))
    assert [len(batch["finished"]) for batch in state["ready"]] == [len(b.finished) for b in first.ready]
    second, after = fresh()
    after.told = list(old_curriculum.told)  # the curriculum's own state
    second.restore(state, groups)
    done += list(go(second, 2, 6))
    assert [b.finished for b in done] == [b.finished for b in expected]
    assert [b.curriculum_metrics for b in done] == [b.curriculum_metrics for b in expected]


def test_without_a_curriculum_nothing_of_it_is_in_the_state():
    s = stream(Recorded(), staleness=1)
    s.start(0)
    assert [set(batch) for batch in s.snapshot()[0]["ready"]] == [{"version", "counts", "groups"}] * 2
    assert s.take(0).finished == []


@pytest.mark.parametrize(
    ("changes", "rollouts", "outcomes"),
    [
        ({"on_failed_sample": "drop_group"}, Recorded(fails=lambda i, s: i == 1 and s == 0), {1: "left_out"}),
        ({"on_failed_sample": "drop_sample"}, Recorded(fails=lambda i, s: i == 1), {1: "left_out"}),
        ({"on_failed_sample": "drop_sample"}, Recorded(fails=lambda i, s: i == 1 and s == 0), {}),
    ],
)
def test_what_a_curriculum_is_told_of_failed_samples(changes, rollouts, outcomes):
    s, _ = with_curriculum(rollouts, **changes)
    batch = first_batch(s)
    assert {g.row: g.outcome for g in batch.finished if g.outcome != "kept"} == outcomes
