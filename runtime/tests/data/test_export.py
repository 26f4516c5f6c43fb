"""Answers as rows: pairs, best of n, labels, and rewards in the prompt; each by numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from rlhf.errors import ConfigError, DataError
from rlhf.types import Row, Trajectory
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import export
from rlhf_runtime.data.recorded_answers import RecordedAnswer
from rlhf_runtime.data.template import Template

CHAT = [{"role": "user", "content": "q"}]


def group(*answers, prompt="q"):
    """(text, reward) each, numbered in order."""
    return [RecordedAnswer(n, prompt, text, reward) for n, (text, reward) in enumerate(answers)]


def left_out(result):
    return {reason: n for reason, n in result.left_out.items() if n}


def test_pairs_are_the_first_best_and_the_first_worst():
    result = export.pairs([group(("a", 1.0), ("b", 3.0), ("c", 3.0), ("d", 0.0), ("e", 0.0))])
    assert result.rows == [
        {"prompt": "q", "chosen": "b", "rejected": "d", "score_chosen": 3.0, "score_rejected": 0.0},
    ]
    assert left_out(result) == {}


def test_prompts_that_give_no_pair_are_counted():
    groups = [
        group(("a", 1.0), ("b", 1.0), ("c", 1.0)),
        group(("a", 1.0), ("a", 0.0)),
        group(("a", 1.0), ("b", None)),
        group(("a", 1.0), ("b", 0.5)),
        [],
    ]
    result = export.pairs(groups)
    assert [row["rejected"] for row in result.rows] == ["b"]
    expected = {
        "answers without a reward": 1,
        "prompts with fewer than two scored answers": 2,
        "prompts whose answers tie": 1,
        "prompts whose best and worst answers are equal texts": 1,
    }
    assert left_out(result) == expected
    assert export.pairs(groups, min_gap=0.5).rows == []
    assert left_out(export.pairs(groups, min_gap=0.5))["prompts whose answers tie"] == 2


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["b", "x"]),
        ({"keep": 2}, ["b", "a", "x", "y"]),  # the second "b" is the same answer
        ({"keep": 9, "min_reward": 1.0}, ["b", "a"]),
    ],
)
def test_best_of_n(options, texts):
    groups = [group(("a", 1.0), ("b", 2.0), ("b", 2.0), ("c", 0.0)), group(("x", 0.0), ("y", 0.0), ("z", None))]
    result = export.best(groups, **options)
    assert [row["completion"] for row in result.rows] == texts
    assert all(set(row) == {"prompt", "completion", "reward"} for row in result.rows)
    none = {"prompts without an answer that reaches min_reward": 1} if "min_reward" in options else {}
    assert left_out(result) == {"answers without a reward": 1, **none}


def test_labels_scored_and_demonstrations():
    groups = [group(("a", 1.0), ("b", 0.9)), group(("c", None), prompt="r")]
    assert export.labels(groups).rows == [
        {"prompt": "q", "completion": "a", "label": True},
        {"prompt": "q", "completion": "b", "label": False},
    ]
    assert [row["label"] for row in export.labels(groups, threshold=0.9).rows] == [True, True]
    assert [row["reward"] for row in export.scored(groups).rows] == [1.0, 0.9]
    assert export.demonstrations(groups).rows[2] == {"prompt": "r", "completion": "c"}
    assert left_out(export.demonstrations(groups)) == {}


def test_rewards_in_the_prompt_are_z_scores_over_all_answers():
    """Rewards 1, 2, 3, 6: mean 3, unbiased variance (4 + 1 + 0 + 9) / 3."""
    result = export.conditional([group(("a", 1.0), ("b", 2.0), ("n", None)), group(("c", 3.0), ("d", 6.0))])
    deviation = math.sqrt(14 / 3)
    assert [row["reward"] for row in result.rows] == pytest.approx([-2 / deviation, -1 / deviation, 0.0, 3 / deviation])
    assert [row["prompt"] for row in result.rows] == [
        "q <rm_score>: -0.93 ", "q <rm_score>: -0.46 ", "q <rm_score>: 0.00 ", "q <rm_score>: 1.39 ",
    ]  # fmt: skip
    assert [row["completion"] for row in result.rows] == ["a", "b", "c", "d"]
    assert left_out(result) == {"answers without a reward": 1}


def test_among_messages_the_reward_is_the_system_message():
    system = {"role": "system", "content": "be kind"}
    result = export.conditional([group(("a", 0.0), ("b", 2.0), prompt=CHAT), group(("c", 1.0), prompt=[system, *CHAT])])
    prompts = [row["prompt"] for row in result.rows]
    assert prompts[0] == [{"role": "system", "content": "<rm_score>: -1.00"}, *CHAT]
    assert prompts[2] == [{"role": "system", "content": "be kind\n<rm_score>: 0.00"}, *CHAT]
    assert result.rows[0]["completion"] == [{"role": "assistant", "content": "a"}]
    assert export.pairs([group(("a", 0.0), ("b", 2.0), prompt=CHAT)]).rows[0]["chosen"] == [
        {"role": "assistant", "content": "b"}
    ]


def test_a_system_message_with_an_image_keeps_its_parts_before_the_reward():
    parts = [{"type": "text", "text": "be kind"}, {"type": "image_url", "image_url": {"url": "data:,A"}}]
    prompt = export.conditioned([{"role": "system", "content": parts}, *CHAT], 1.0)
    assert prompt == [{"role": "system", "content": [*parts, {"type": "text", "text": "\n<rm_score>: 1.00"}]}, *CHAT]
    assert len(parts) == 2


def test_a_reward_is_written_into_a_prompt_as_in_training(chars, chat):
    """What `rlhf eval` puts around a prompt by options is what the export put around it."""
    row = Row({"prompt": "q"}, "rows", 0)
    for tokenizer, asking, prompt in (
        (chars, {"input_template": "{prompt} <rm_score>: 5.00 "}, "q"),
        (chat, {"system": "<rm_score>: 5.00"}, CHAT),
    ):
        template = Template(tokenizer, DataSection(**asking))
        render = template.prompt_of(Trajectory(row, [template.encode_prompt(row)], (0, 0)))
        assert render == export.conditioned(prompt, 5.0)


@pytest.mark.parametrize(
    ("rewards", "description"), [([], "0 rewards"), ([1.0], "1 reward"), ([2.0, 2.0, 2.0], "3 rewards, all equal,")]
)
def test_equal_rewards_are_refused(rewards, description):
    with pytest.raises(DataError, match=f"^{description} cannot be normalised"):
        export.conditional([group(*(("a", r) for r in rewards))])


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("{prompt} good", "does not contain the reward"),
        ("{prompt} {score}", "cannot be filled in: KeyError 'score'"),
        ("{prompt} {reward:x}", "cannot be filled in: ValueError"),
        ("{", "cannot be filled in: ValueError"),
        ("{prompt} {reward[0]}", "cannot be filled in: TypeError"),
        ("{prompt.text} {reward}", "cannot be filled in: AttributeError"),
        ("Reward: {reward}", "does not contain the prompt, so rows would lose it"),
    ],
)
def test_a_condition_must_show_the_reward_and_a_plain_prompt(condition, message):
    with pytest.raises(ConfigError, match=message):
        export.conditional([group(("a", 0.0), ("b", 1.0))], condition)
