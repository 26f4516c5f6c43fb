"""Staleness is exact, filters refill exactly what is missing, and a stream resumes with its ready batches."""

from dataclasses import replace

import pytest
from rlhf.errors import TrainingError
from rlhf.types import Group, Row, Sampling, Trajectory, Turn
from rlhf_runtime.config.sections import FilterSection
from rlhf_runtime.samples.rollouts import RolloutSettings
from rlhf_runtime.samples.stream import Stream, passes


class Counting:
    """Rows 0, 1, 2, ... for ever."""

    def __init__(self):
        self.next = 0

    def take(self, n):
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
    """Stands where the rollouts are: scores are given by row, and every call is kept."""

    def __init__(self, score=lambda i: 0.5, fails=lambda i, s: False):
        self.generator, self.calls = Versioned(), []
        self.score, self.fails = score, fails

    def run(self, rows, first_number, settings):
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
    options = {"batch_size": 4, "total_steps": 6, **changes}
    return Stream(Counting(), rollouts, settings, **options)


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


def test_a_batch_is_handed_out_for_its_own_step_only():
    s = stream(Recorded(), staleness=1)
    with pytest.raises(TrainingError, match=r"step 0 was asked for, but none is ready; start\(0\)"):
        s.take(0)
    s.start(0)
    with pytest.raises(TrainingError, match="step 1 was asked for, but the oldest that is ready is of step 0"):
        s.take(1)
    s.take(0)
    with pytest.raises(TrainingError, match="step 0 was asked for, but the oldest that is ready is of step 1"):
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
def test_a_round_is_generated_at_its_first_step_with_the_weights_of_then(round, versions, calls):
    rollouts = Recorded()
    s = stream(rollouts, round=round)
    taken, generated = [], []
    for step in range(6):
        s.start(step)
        taken.append(s.take(step))
        generated.append(len(rollouts.calls))
        if s.samples_with(step + 1):  # what nobody samples with is not sent
            rollouts.generator.version = step + 1
    assert [ready.version for ready in taken] == versions == [round * (k // round) for k in range(6)]
    assert generated == calls, "nothing in the middle of a round, nothing beyond the last step"
    assert [g.number for ready in taken for g in ready.groups] == list(range(24))


def test_a_round_goes_on_with_its_own_samples_after_a_resume():
    rollouts = Recorded()
    s = stream(rollouts, round=3)
    s.start(0)
    s.take(0)
    saved, groups = s.state_dict(), [g for b in s.ready for g in b.groups]
    again_rollouts = Recorded()
    again = stream(again_rollouts, round=3)
    again.load_state_dict(saved, groups)
    again_rollouts.generator.version = 1  # a start brings the weights of now to the generator, whatever the round
    taken = []
    for step in range(1, 6):
        again.start(step)
        taken.append(again.take(step))
        again_rollouts.generator.version = step + 1
    assert [(b.version, b.groups[0].number) for b in taken] == [(0, 4), (0, 8), (3, 12), (3, 16), (3, 20)]
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
def test_a_run_that_gets_more_steps_generates_at_once_what_it_would_have_before(options, done, versions):
    """The weights that the definition asks of the first further batches are gone: they get those of the resume."""
    rollouts = Recorded()
    s = stream(rollouts, **options)
    for step in range(done):
        s.start(step)
        s.take(step)
        rollouts.generator.version = step + 1
    saved, groups = s.state_dict(), [g for b in s.ready for g in b.groups]
    longer = stream(rollouts, **options, total_steps=12)
    longer.load_state_dict(saved, groups)
    taken = []
    for step in range(done, 12):
        longer.start(step)
        taken.append(longer.take(step))
        rollouts.generator.version = step + 1
    assert [b.version for b in taken] == versions
    assert [g.number for b in taken for g in b.groups] == list(range(4 * done, 48)), "no prompt is skipped or repeated"


def test_a_generator_with_the_wrong_weights_is_an_error():
    rollouts = Recorded()
    s = stream(rollouts)
    s.start(0)
    s.take(0)
    with pytest.raises(TrainingError, match=r"must be generated with weight version 1 .* holds version 0"):
        s.start(1)


def test_rejected_groups_are_replaced_exactly_and_accepted_ones_kept():
    rollouts = Recorded(score=lambda i: [0, 1, 0.5][i % 3])
    s = stream(rollouts, filter=FilterSection(low=0.0, high=1.0))
    s.start(0)
    ready = s.take(0)
    assert [g.row.index for g in ready.groups] == [2, 5, 8, 11]
    assert [len(rows) for _, rows, _ in rollouts.calls] == [4, 3, 2, 1, 1, 1], "asks for exactly what is missing"
    assert ready.counts["prompts"] == 12
    assert ready.counts["filtered"] == 8
    assert ready.counts["short"] == 0


def test_a_filter_that_never_fills_the_batch_trains_on_what_it_has():
    s = stream(Recorded(score=lambda i: float(i == 0) / 2), filter=FilterSection(low=0.1, max_rounds=3))
    s.start(0)
    ready = s.take(0)
    assert [g.row.index for g in ready.groups] == [0]
    assert ready.counts["short"] == 3


def test_answers_of_the_data_pass_the_filter_and_are_counted():
    class Mixed(Recorded):
        def run(self, rows, first_number, settings):
            groups = super().run(rows, first_number, settings)
            for group in groups:
                if group.row.index in (1, 6):
                    answer = Turn([2], True, given=True)
                    group.trajectories = [Trajectory(group.row, [Turn([1], False), answer], (group.number, 0))]
            return groups

    s = stream(Mixed(score=lambda i: float(i == 3)), filter=FilterSection(low=0.1, max_rounds=2), group_min=2)
    s.settings = replace(s.settings, given=0.5)
    s.start(0)
    ready = s.take(0)
    assert [g.row.index for g in ready.groups] == [1, 3, 6]
    assert (ready.counts["given"], ready.counts["filtered"], ready.counts["short"]) == (2, 5, 1)


@pytest.mark.parametrize(
    ("policy", "rows", "samples"),
    [("drop_sample", [0, 1, 2, 3], [2, 1, 2, 2]), ("drop_group", [0, 2, 3, 4], [2, 2, 2, 2])],
)
def test_failed_samples_leave_alone_or_with_their_group(policy, rows, samples):
    s = stream(Recorded(fails=lambda i, s: (i, s) == (1, 0)), on_failed_sample=policy)
    s.start(0)
    ready = s.take(0)
    assert [g.row.index for g in ready.groups] == rows
    assert [len(g.trajectories) for g in ready.groups] == samples
    assert (ready.counts["failed_samples"], ready.counts["failed_groups"]) == (1, float(policy == "drop_group"))
    assert (ready.counts["prompts"], ready.counts["short"]) == (4 + (policy == "drop_group"), 0)


def test_a_group_left_with_fewer_samples_than_needed_is_refilled():
    s = stream(Recorded(fails=lambda i, s: (i, s) == (1, 0)), on_failed_sample="drop_sample", group_min=2)
    s.start(0)
    ready = s.take(0)
    assert [g.row.index for g in ready.groups] == [0, 2, 3, 4]
    assert (ready.counts["failed_samples"], ready.counts["failed_groups"], ready.counts["prompts"]) == (1, 1, 5)


def test_without_a_filter_failed_groups_are_replaced_for_twenty_rounds():
    rollouts = Recorded(fails=lambda i, s: True)
    s = stream(rollouts, on_failed_sample="drop_group")
    s.start(0)
    ready = s.take(0)
    assert len(rollouts.calls) == 1 + 20
    assert (ready.groups, ready.counts["short"], ready.counts["failed_groups"]) == ([], 4, 84)


def test_ready_batches_come_back_after_a_resume():
    rollouts = Recorded()
    s = stream(rollouts, staleness=2)
    s.start(0)
    s.take(0)
    saved, groups = s.state_dict(), [g for b in s.ready for g in b.groups]
    again_rollouts = Recorded()
    again = stream(again_rollouts, staleness=2)
    again.load_state_dict(saved, groups)
    for one, source in ((s, rollouts), (again, again_rollouts)):
        source.generator.version = 1
        one.start(1)
    assert [(b.version, [g.number for g in b.groups], b.counts) for b in again.ready] == [
        (b.version, [g.number for g in b.groups], b.counts) for b in s.ready
    ]
    assert again.ready[0].counts["prompts"] == 4
    assert again_rollouts.calls == rollouts.calls[3:], "nothing is generated twice"


@pytest.mark.parametrize(
    ("filter", "scores", "passed"),
    [
        ({"low": 0.0, "high": 1.0}, [0, 0], False),
        ({"low": 0.0, "high": 1.0}, [1, 1], False),
        ({"low": 0.0, "high": 1.0}, [0, 1], True),
        ({"min_std": 0.0}, [0.3, 0.3], False),
        ({"min_std": 0.0}, [0.1, 0.1, 0.1], False),  # 0.1 + 0.1 + 0.1 is not 3 times 0.1
        ({"low": 0.1}, [0.1, 0.1, 0.1], False),
        ({"min_std": 0.0}, [0.3, 0.4], True),
        ({"low": 0.0}, [], False),
        ({"low": 0.25}, [0.0, 0.5], False),  # a mean of exactly 0.25
        ({"low": 0.24}, [0.0, 0.5], True),
        ({"high": 0.25}, [0.0, 0.5], False),
        ({"high": 0.26}, [0.0, 0.5], True),
        ({"high": 0.5}, [], False),
        ({"min_std": 0.5}, [0, 1], False),  # of the population: exactly 0.5, of a sample 0.71
        ({"min_std": 0.49}, [0, 1], True),
        ({"min_std": 0.25}, [1.0, 1.5, 1.0, 1.5], False),
        ({"min_std": 0.24}, [1.0, 1.5, 1.0, 1.5], True),
        ({"low": 0.0, "min_std": 0.3}, [0.5, 1.0], False),  # each of the conditions
    ],
)
def test_the_filter_is_strict(filter, scores, passed):
    assert passes(FilterSection(**filter), scores) is passed


class Unscored(Recorded):
    """Nothing scores these samples."""

    def run(self, rows, first_number, settings):
        groups = super().run(rows, first_number, settings)
        for trajectory in (t for g in groups for t in g.trajectories):
            trajectory.reward = trajectory.score = None
        return groups


def test_samples_without_a_reward_reach_an_algorithm_that_needs_none():
    s = stream(Unscored(fails=lambda i, s: i == 1 and s == 0), scored=False, on_failed_sample="drop_sample")
    s.start(0)
    ready = s.take(0)
    assert [len(g.trajectories) for g in ready.groups] == [2, 1, 2, 2]
    assert ready.counts["failed_samples"] == 1
    left_out = stream(Unscored(), on_failed_sample="drop_sample")
    left_out.start(0)
    assert left_out.take(0).groups == []
