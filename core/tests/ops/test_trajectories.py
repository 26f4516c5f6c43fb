"""Scored groups become a batch: its tokens, its columns, and the tokens that get rewards."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import TrainingError
from rlhf.ops.trajectories import assemble, compress, expand
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_testing import fabricate

ROW = Row({"prompt": "?"}, "data", 3)


def said(*ids, finish="stop", temperature=1.0, **kw):
    return Turn(list(ids), True, [-0.5] * len(ids), finish=finish, temperature=temperature, **kw)


def context(*ids, **kw):
    return Turn(list(ids), False, **kw)


def trajectory(*turns, reward=1.0, sample=0, **kw):
    return Trajectory(ROW, list(turns), (5, sample), reward=reward, **kw)


def stepped(turn, token, value):
    return trajectory(context(1), said(2), rewards={"p": RewardResult(0.0, steps=((turn, token, value),))})


def group(*trajectories):
    return Group(ROW, 5, list(trajectories))


def test_each_trajectory_is_one_unit_with_masks_and_columns():
    batch = assemble(
        [group(trajectory(context(1, 2), said(3, 4, temperature=0.5), context(5), said(6, finish="length")))]
    )
    assert batch.ids_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.tok["loss_mask"].tolist() == [False, False, True, True, False, True]
    assert batch.tok["last_action"].tolist() == [False] * 5 + [True]
    assert batch.tok["temperature"].tolist() == [1, 1, 0.5, 0.5, 1, 1]
    assert batch.tok["gen_logprobs"].tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert {k: v.tolist() for k, v in batch.unit.items()} == {
        "reward": [1.0], "score": [1.0], "group": [5], "sample": [0], "own_tokens": [3], "truncated": [True],
        "is_demonstration": [False],
    }  # fmt: skip


def test_an_answer_may_be_several_turns():
    def answer(*texts):
        return Trajectory(ROW, [Turn([1], sampled=text.islower(), text=text) for text in texts], (0, 0)).answer

    assert answer("Q", "a", "b") == "ab"
    assert answer("Q", "a", "O", "b", "c") == "bc"
    assert answer("Q", "a", "b", "O") == "ab"
    assert answer("Q") == ""


def test_truncation_and_length_of_multi_turn():
    """Defects 12 and 17: truncation was lost, and observations were counted as the policy's tokens."""
    cut = trajectory(context(1), said(2), context(7, 7, 7, 7), said(3, finish="length"))
    fine = trajectory(context(1), said(2, finish="length"), context(7), said(3), sample=1)
    batch = assemble([group(cut, fine)])
    assert batch.unit["truncated"].tolist() == [True, False]
    assert batch.unit["own_tokens"].tolist() == [2, 2]


def test_rewritten_context_is_a_second_sequence_of_the_same_unit():
    batch = assemble([group(trajectory(context(1), said(2), context(8, 9, fresh=True), said(3, 4)))])
    assert (batch.units, batch.sequences, batch.answers) == (1, 2, 1)
    assert batch.lens_B.tolist() == [2, 4]
    assert batch.tok["last_action"].tolist() == [False] * 5 + [True]


def test_tokens_after_the_last_sampled_token_are_left_out():
    batch = assemble([group(trajectory(context(1), said(2), context(5, 5, 5), context(6, fresh=True)))])
    assert batch.ids_N.tolist() == [1, 2]
    empty = assemble([group(trajectory(context(1), said(2), context(5, 5), said()))])  # an empty answer chose nothing
    assert empty.ids_N.tolist() == [1, 2]


def test_observations_are_what_follows_an_answer_in_its_sequence():
    """Not the prompt, an opening after it, a rewritten context, or what no answer follows."""
    first = trajectory(
        context(1),
        context(2),
        said(3),
        context(4, 5),
        context(6),
        said(7),
        context(8, fresh=True),
        said(9),
        context(10),
    )
    second = trajectory(context(1), said(2), context(3), said(4), sample=1)
    batch = assemble([group(first, second)], observations=True)
    assert batch.ids_N[batch.tok["observation_mask"]].tolist() == [4, 5, 6, 3]
    assert not (batch.tok["observation_mask"] & batch.tok["loss_mask"]).any()
    assert "observation_mask" not in assemble([group(first, second)]).tok


def test_only_sampled_turns_have_a_temperature():
    batch = assemble([group(trajectory(context(1, temperature=0.0), said(2, temperature=0.7)))])
    assert batch.tok["temperature"].tolist() == pytest.approx([1.0, 0.7])


def test_failed_and_unscored_trajectories_are_left_out():
    failed = trajectory(context(1), said(2), status="failed", sample=1)
    unscored = trajectory(context(1), said(2), reward=None, sample=2)
    empty = trajectory(context(1, 1), said(), sample=3)
    batch = assemble([group(trajectory(context(1), said(2)), failed, unscored, empty)])
    assert batch.unit["sample"].tolist() == [0, 3]
    assert batch.unit["own_tokens"].tolist() == [1, 0]
    other = assemble([group(empty, trajectory(context(1), said(2)))])
    assert other.tok["last_action"].tolist() == [False, False, False, True]
    assert assemble([group(failed, unscored)]) is None
    assert assemble([group(empty)]) is None
    assert assemble([]) is None


def test_without_scoring_only_failed_trajectories_are_left_out():
    """A reward that is present is ignored, even if it is not a number."""
    failed = trajectory(context(1), said(2), reward=None, sample=1, status="failed")
    groups = [
        group(
            trajectory(context(1), said(2), reward=None), failed, trajectory(context(1), said(3), reward=float("nan"))
        )
    ]
    batch = assemble(groups, scored=False)
    assert batch.ids_N.tolist() == [1, 2, 1, 3]
    assert sorted(batch.unit) == ["group", "is_demonstration", "own_tokens", "sample", "truncated"]
    assert assemble([group(failed)], scored=False) is None
    assert assemble([group(groups[0].trajectories[0])]) is None


def test_step_rewards_count_once():
    steps = {
        "prm": RewardResult(0.0, steps=((1, 0, 2.0), (3, 1, -1.0))),
        "outcome": RewardResult(1.0, steps=((1, 0, 9.0),)),
    }
    t = trajectory(context(1), said(2, 3, reward=0.25), context(4), said(5, 6, reward=4.0), reward=1.0, rewards=steps)
    assert not assemble([group(t)]).tok["step_reward"].any()
    batch = assemble([group(t)], {"prm": 0.5, "says_nothing_of_it": 1.0})
    assert batch.tok["step_reward"].tolist() == [0, 1.0, 0, 0, 0, -0.5]
    assert batch.unit["reward"].tolist() == [1.0]
    combined = assemble([group(t)], {"prm": 0.5, "env": 2.0})
    assert combined.tok["step_reward"].tolist() == [0, 1.0, 0.5, 0, 0, 7.5]


def test_the_reward_of_a_turn_without_tokens_is_at_the_sampled_token_before_it():
    """An empty answer is a turn too. Its reward is dropped if no token was sampled before it."""
    turns = [
        context(1),
        said(reward=8.0),
        context(4),
        said(2, 3, reward=0.5),
        context(4),
        said(reward=0.25),
        context(4),
        said(5),
    ]
    batch = assemble([group(trajectory(*turns))], {"env": 1.0})
    assert batch.ids_N.tolist() == [1, 4, 2, 3, 4, 4, 5]
    assert batch.tok["step_reward"].tolist() == [0, 0, 0, 0.75, 0, 0, 0]


def test_log_probs_only_where_every_sample_has_them():
    bare = trajectory(context(1), Turn([2], True), sample=1)
    assert not assemble([group(trajectory(context(1), said(2)), bare)]).has("gen_logprobs")


@pytest.mark.parametrize(
    ("broken", "sources", "message"),
    [
        (trajectory(context(1), said(2), reward=float("nan")), {}, "its reward is nan"),
        (trajectory(context(1), said(2), score=float("inf")), {}, "its score is inf"),
        (trajectory(context(1), Turn([2, 3], True, [-1.0])), {}, "needs 2 finite log-probs"),
        (trajectory(context(1), Turn([2], True, [float("-inf")])), {}, "of which 0 finite"),
        (trajectory(context(1), said(2, temperature=0.0)), {}, "temperature above 0"),
        (
            trajectory(context(1), said(2), Turn([3], True, [-1.0], fresh=True)),
            {},
            "a sequence starts with the context",
        ),
        (stepped(0, 0, 1.0), {"p": 1.0}, "belongs to a token that the policy sampled"),
        (stepped(1, 1, 1.0), {"p": 1.0}, "token 1 of turn 1"),
        (stepped(4, 0, 1.0), {"p": 1.0}, "no such turn"),
        (stepped(1, 0, float("nan")), {"p": 1.0}, "step reward of 'p' is nan"),
    ],
)
def test_invalid_rewards_steps_and_log_probs_are_refused(broken, sources, message):
    with pytest.raises(TrainingError, match=message) as error:
        assemble([group(broken)], sources)
    assert "sample 0 of group 5 (row 3 of 'data')" in str(error.value)


def test_compress_and_expand_are_inverse():
    batch = assemble(fabricate.groups(4))
    values_N = torch.arange(batch.tokens).float() + 1
    values_UA, mask_UA = compress(batch, values_N)
    assert mask_UA.sum(1).tolist() == batch.unit["own_tokens"].tolist()
    mask = batch.tok["loss_mask"]
    for u in range(batch.units):
        assert values_UA[u][mask_UA[u]].tolist() == values_N[mask & (batch.unit_N == u)].tolist()
        assert not values_UA[u][~mask_UA[u]].any()
    assert torch.equal(expand(batch, values_UA), torch.where(mask, values_N, 0.0))


def played(agent, sample, *tokens, reward=1.0):
    """A prompt, and a turn of each token after what the other agent did."""
    turns = [context(1, agent=agent)]
    for token in tokens:
        turns += [said(token, agent=agent, reward=0.5), context(8, agent=agent)]
    return trajectory(*turns[:-1], sample=sample, reward=reward)


def test_the_trajectories_of_each_agent_are_a_group_of_their_own():
    """No number of a group, of a running mean or of a state is of two agents. Only own turns are in the mask."""
    game = group(played("x", 0, 2, 3), played("y", 0, 4), played("x", 1, 5))
    batch = assemble([game, group(trajectory(context(1), said(2)))], key=(), turns=True)
    first, second, third, single = batch.unit["group"].tolist()
    assert first == third != second
    assert single == 5, "one agent without a name"
    assert batch.unit["sample"].tolist() == [0, 0, 1, 0]
    keys = batch.unit["key"].tolist()
    assert (keys[0] == keys[2], len({*keys})) == (True, 3)
    assert batch.ids_N[batch.tok["loss_mask"]].tolist() == [2, 3, 4, 5, 2]
    states = batch.tok["state"][batch.tok["loss_mask"]].tolist()
    assert states[0] == states[3], "the first turns of one agent"
    assert len({*states}) == 4
    assert {a: [t.index for t in part.trajectories] for a, part in game.by_agent().items()} == {
        "x": [(5, 0), (5, 1)],
        "y": [(5, 0)],
    }
    with pytest.raises(TrainingError, match=r"sample 0 of group 5 as 'y' .*: its reward is nan"):
        assemble([group(played("y", 0, 4, reward=float("nan")))])
