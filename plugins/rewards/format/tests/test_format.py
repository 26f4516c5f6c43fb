"""The format reward: templates in linear time, patterns in a process that can be killed."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_plugin_format import FormatReward

from tests.support.scoring import score_groups

THINK = "<think>{...}</think><answer>{...}</answer>"


def group(*answers: str) -> Group:
    row = Row({}, "unit", 0)
    turns = [
        [
            Turn([1], False, text="Q"),
            Turn([2], True, text="first"),
            Turn([3], False, text="|obs|"),
            Turn([2], True, text=a),
        ]
        for a in answers
    ]
    return Group(row, 0, [Trajectory(row, t, (0, i)) for i, t in enumerate(turns)])


def values(*answers: str, **config) -> list[float | None]:
    return [r.value for r in FormatReward(FormatReward.Config(**config)).score(group(*answers))]


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("<think>a</think><answer>b</answer>", True),
        (" <think>\na\n</think>\n\n<answer> b </answer>\n", True),
        ("<think>a < b</think><answer>c > d</answer>", True),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("well <think>a</think><answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> done", False),
        ("<think>a</think><answer>b", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("", False),
    ],
)
def test_a_template(text: str, matches: bool) -> None:
    assert values(text, template=THINK) == [float(matches)]


def test_a_template_with_an_open_end() -> None:
    assert values("Answer: 5", "Answer:", "5", template="Answer: {...}") == [1.0, 0.0, 0.0]
    assert values("so #### 5", "#### 5", template="{...}####{...}") == [1.0, 0.0]


def test_a_piece_inside_another_piece_is_counted() -> None:
    form = "A: {...} AA: {...}"
    assert values("A: 5 AA: 6", "A: 5 AA: 6 A: 7", "A: 5 A: 6", "AA: 5 A: 6", template=form) == [1.0, 0.0, 0.0, 0.0]


def opened(prompt: str, answer: str, **config) -> float | None:
    """The value of an answer after a prompt, with an earlier turn before them."""
    turns = [Turn([1], False, text="Q"), Turn([2], True, text="first"), Turn([1], False, text=prompt)]
    row = Row({}, "unit", 0)
    trajectory = Trajectory(row, [*turns, Turn([3], True, text=answer)], (0, 0))
    return FormatReward(FormatReward.Config(**config)).score(Group(row, 0, [trajectory]))[0].value


@pytest.mark.parametrize("form", [{"template": THINK}, {"pattern": r"<think>.+</think>\s*<answer>.+</answer>"}])
def test_a_tag_that_the_chat_template_opens_belongs_to_the_answer(form: dict) -> None:
    answer = "a</think><answer>b</answer>"
    assert opened("Q\n<think>\n", answer, **form) == 1.0
    assert opened("Q\n<think>\n", f"<think>{answer}", **form) == 1.0, "as it is sampled"
    for prompt in ("Q\n", "<think> Q\n", "Q <think></think>\n\n", "Q </think>", "Q <|assistant|>"):
        assert opened(prompt, answer, **form) == 0.0, prompt
    assert opened("<think>", answer, on="completion", **form) == 0.0, "the first sampled turn is not opened"
    assert opened("<think>\n", "a", pattern="a") == 1.0, "a pattern without the tag goes on to match"


def test_an_answer_of_several_turns_is_opened_by_the_text_before_the_first() -> None:
    parts = [("2+2=<think>", False), ("sum</think>", True), ("<answer>4</answer>", True)]
    turns = [Turn([1], sampled=sampled, text=text) for text, sampled in parts]
    row = Row({}, "data", 0)
    reward = FormatReward(FormatReward.Config(template="<think>{...}</think><answer>{...}</answer>"))
    assert [r.value for r in reward.score(Group(row, 0, [Trajectory(row, turns, (0, 0))]))] == [1.0]


def test_the_texts_that_answers_must_have() -> None:
    assert list(FormatReward(FormatReward.Config(template=THINK)).texts()) == [
        "<think>", "</think>", "<answer>", "</answer>",
    ]  # fmt: skip
    assert "<|a|>" in next(iter(FormatReward(FormatReward.Config(pattern=r"<\|a\|>.*")).texts()))


def test_a_pattern_fully_or_anywhere() -> None:
    assert values("12", "a12", "1\n2", pattern=r"\d.?\d") == [1.0, 0.0, 1.0]
    assert values("12", "a12", "a", pattern=r"\d\d", mode="search", match=0.5, no_match=-0.5) == [0.5, 0.5, -0.5]


def test_on_the_whole_completion() -> None:
    assert values("x", pattern=r"first\|obs\|x", on="completion") == [1.0]
    assert values("x", pattern=r"first\|obs\|x") == [0.0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "exactly one of `template` and `pattern`"),
        ({"template": "a{...}", "pattern": "a"}, "exactly one of"),
        ({"pattern": "(a"}, r"`pattern` '\(a' is not a regular expression: missing \)"),
        ({"template": "{...}"}, "no text besides its gaps"),
        ({"template": "a{...}{...}b"}, "two gaps .* side by side"),
    ],
)
def test_a_bad_config_is_refused(config: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FormatReward.Config(**config)


def test_a_template_takes_linear_time() -> None:
    begin = time.process_time()
    assert values("<think>" * 200_000, "<think>" + "</think" * 200_000, template=THINK) == [0.0, 0.0]
    assert time.process_time() - begin < 1.0


def test_a_pattern_that_backtracks_for_ever_is_killed() -> None:
    slow, fine = group("a" * 64 + "c"), group("aaab")
    score_groups("format", slow, fine, options={"pattern": r"(a+)+b"}, deadline=0.5)
    assert "took longer than its deadline of 0.5 s; its worker process was killed" in slow.trajectories[0].error
    assert fine.trajectories[0].reward == 1.0
