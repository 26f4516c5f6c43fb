"""Answers of the data beside sampled ones: what an algorithm may declare, and what does not go with it."""

import pytest
from rlhf.errors import ConfigError

from runtime.tests.checks.stub_run import StubAlgorithm, check

BASE = [("algorithm", "x"), ("policy.model", "m"), ("data.train", "a.jsonl")]


class Mixing(StubAlgorithm):
    name = "mixing"


def test_given_answers_without_a_reward_are_accepted():
    check(BASE, Mixing(demonstration_share=0.5, reward=False))


def test_answers_of_the_data_among_samples_are_accepted():
    check([*BASE, ("reward", "math"), ("sampling.samples_per_prompt", "3")], Mixing(demonstrations_per_group=2))


def test_no_reward_scores_demonstrations():
    scored = [("data.train", "b.jsonl"), ("reward", "math"), ("reward.0.sources", '["b"]')]
    check([*BASE, *scored, ("data.response", "answer")], Mixing(demonstration_sources=("a",)))


@pytest.mark.parametrize(
    ("needs", "flags", "message"),
    [
        ({"demonstration_share": 0.5}, [("reward", "math")], "declares demonstration_share = 0.5 and reward = True"),
        ({"demonstration_share": 1.0, "reward": False}, [], "declares demonstration_share = 1 and reward = False"),
        (
            {"demonstration_share": -0.1, "reward": False},
            [],
            "demonstration_share needs reward = False and a value from 0 to below 1",
        ),
        (
            {"demonstration_share": 0.25, "reward": False},
            [("env", "game")],
            "a share of 0.25 of the rows.* but env 'game' is set",
        ),
        ({"demonstration_sources": ("a",)}, [("env", "game")], "the rows of 'a'.* but env 'game' is set"),
        (
            {"demonstrations_per_group": 2},
            [("reward", "math"), ("env", "game")],
            "answers of all rows.* but env 'game' is set",
        ),
        (
            {"demonstrations_per_group": 1, "reward": False},
            [],
            "declares demonstrations_per_group = 1 and reward = False",
        ),
        (
            {"demonstrations_per_group": 2},
            [("reward", "math"), ("sampling.samples_per_prompt", "2")],
            "samples_per_prompt = 2; set --sampling.samples_per_prompt 3 or more",
        ),
        (
            {"demonstrations_per_group": 1, "generator_logprobs": True},
            [("reward", "math"), ("sampling.samples_per_prompt", "2")],
            "for which the generator reports no log-probs, but reads the generator's log-probs",
        ),
        (
            {"demonstration_sources": ("a",)},
            [("reward", "math"), ("reward.0.sources", '["a"]'), ("data.train", "b.jsonl")],
            "no reward scores the rows of 'b' of data.train",
        ),
    ],
)
def test_combinations_that_given_answers_do_not_support_are_refused(needs, flags, message):
    with pytest.raises(ConfigError, match=message):
        check([*BASE, *flags], Mixing(**needs), needs_env="env" in dict(flags))
