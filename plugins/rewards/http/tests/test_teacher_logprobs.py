"""The reward ``teacher``: log-probs of sampled tokens from a server, and servers that do not give them."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace

import pytest
from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import RewardContext, Tokens
from rlhf.types import Group, Image, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_http import TeacherReward, servers, teacher_logprobs
from rlhf_testing.reward import RewardContract
from rlhf_testing.tiny import tiny_model

from tests.support.teacher_server import TeacherServer, model_score

BYTES = Tokens(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"))


def token_score(ids):
    """Differs between tokens and between places."""
    return [-(token % 7) / 8 - n / 64 for n, token in enumerate(ids[1:])]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.0)


@pytest.fixture
def server():
    with TeacherServer(BYTES.encode, token_score) as instance:
        yield instance


def reward(*addresses: str, **options) -> TeacherReward:
    return TeacherReward(TeacherReward.Config(urls=addresses, **options))


def group(*samples: list[Turn]) -> Group:
    row = Row({}, "unit", 0)
    return Group(row, 0, [Trajectory(row, turns, (0, n)) for n, turns in enumerate(samples)])


def answered(*ids: int, **turn) -> list[Turn]:
    return [Turn([3, 4], False), Turn(list(ids), True, **turn)]


def score(teacher: TeacherReward, *samples: list[Turn]) -> list[RewardResult]:
    return asyncio.run(teacher.score(group(*samples)))


class TestTeacher(RewardContract):
    reward = TeacherReward
    cases = (({"prompt": "ab"}, "cd", None),)

    @pytest.fixture(autouse=True)
    def configured(self, server):
        self.configs = (TeacherReward.Config(urls=(server.url,)),)


@pytest.mark.parametrize("limit", [16_384, 12])
def test_the_steps_are_the_models_logprobs_of_the_sampled_tokens(tmp_path, monkeypatch, limit) -> None:
    """Of one turn, of several, and of contexts that were rewritten; in one request, and in several."""
    monkeypatch.setattr(teacher_logprobs, "REQUEST", limit)
    model = tiny_model(tmp_path / "model", seed=3)
    turns = [*answered(5, 6), Turn([7, 8, 9], False), Turn([10], True), Turn([11], False)]
    fresh = [*answered(5), Turn([12, 13], False, fresh=True), Turn([14, 15], True)]
    with TeacherServer.of_model(model) as server:
        results = score(reward(server.url, model="m"), answered(5, 6, 7), turns, fresh, answered())
        prompts = [ids for question in server.asked for ids in question["prompt"]]
    assert sorted(prompts) == sorted([[3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10], [3, 4, 5], [12, 13, 14, 15]])
    assert {question["model"] for question in server.asked} == {"m"}
    assert len(server.asked) == (1 if limit > 12 else 3)
    plain = model_score(model)
    full, first, second = plain([3, 4, 5, 6, 7, 8, 9, 10]), plain([3, 4, 5]), plain([12, 13, 14, 15])
    expected = [
        [(1, n, v) for n, v in enumerate(plain([3, 4, 5, 6, 7])[1:])],
        [(1, 0, full[1]), (1, 1, full[2]), (3, 0, full[6])],
        [(1, 0, first[1]), (3, 0, second[1]), (3, 1, second[2])],
        [],
    ]
    for result, steps in zip(results, expected, strict=True):
        assert [step[:2] for step in result.steps] == [step[:2] for step in steps]
        assert [step[2] for step in result.steps] == pytest.approx([step[2] for step in steps], abs=1e-12)
        assert result.value is result.score is None


def shortened(choices):
    choices[1]["prompt_logprobs"].pop()


def other_token(choices):
    choices[1]["prompt_logprobs"][3] = {"99": {"logprob": -1.0}}


def value(number):
    def change(choices):
        next(iter(choices[1]["prompt_logprobs"][3].values()))["logprob"] = number

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shortened, r"sequence 1: 4 log-probs for 5 tokens"),
        (other_token, r"sequence 1: the log-prob of token 3 must be for 6, got one for 99"),
        (value(0.5), "token 3 is float 0.5; allowed: a finite number up to 0"),
        (value(-(10**400)), "token 3 is int -1.*; allowed: a finite number up to 0"),
        (value(None), r"token 3 is .*None"),
        (value(math.nan), r"token 3 is .*nan"),
        (value(True), r"token 3 is .*True"),
        (lambda choices: choices.pop(), "not one choice with prompt_logprobs for each of 2 prompts"),
        (lambda choices: choices.append({**choices[0], "index": 2}), "3 choices to 2 prompts"),
        (lambda choices: choices[1].update(prompt_logprobs=None), "NoneType"),
        (lambda choices: choices[1].pop("prompt_logprobs"), "not one choice with prompt_logprobs"),
    ],
)
def test_a_server_that_answers_something_else_fails_the_samples(server, change, words) -> None:
    server.change = change
    with pytest.raises(RewardError, match=words):
        score(reward(server.url), answered(5, 6, 7), answered(5, 6, 8))


def test_the_next_server_is_asked_and_the_key_comes_from_the_environment(server, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with TeacherServer(BYTES.encode, token_score) as busy:
        busy.status = 503
        teacher = reward(busy.url, server.url, token_env="TEACHER_KEY")
        with caplog.at_level(logging.WARNING):
            [result] = score(teacher, answered(5, 6))
    assert [step[2] for step in result.steps] == token_score([3, 4, 5, 6])[1:]
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "reward 'teacher'" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(ConfigError, match="token_env = 'NO_KEY'"):
        reward(server.url, token_env="NO_KEY")


def setup(teacher: TeacherReward) -> None:
    asyncio.run(teacher.setup(RewardContext(tokens=BYTES)))


def test_every_server_is_probed_before_the_first_sample(server) -> None:
    setup(reward(server.url))
    assert [type(question["prompt"]) for question in server.asked] == [str, list]
    with (
        TeacherServer(lambda text: [*text.encode()[:20], 0, *text.encode()[20:]], token_score) as other,
        pytest.raises(ConfigError, match=r"a different vocabulary from the policy's.*they differ at token 20"),
    ):
        setup(reward(server.url, other.url))
    server.change = lambda choices: choices[0]["prompt_logprobs"].pop()
    with pytest.raises(ConfigError, match=r"cannot score the policy's tokens.*log-probs for"):
        setup(reward(server.url))
    server.status = 400
    with pytest.raises(ConfigError, match=r"cannot score the policy's tokens.*HTTP status 400.*vLLM"):
        setup(reward(server.url))


def test_samples_that_a_server_cannot_score_as_the_policy_are_refused(server) -> None:
    with pytest.raises(RewardError, match=r"sampled at temperature 0.5.*sampling.temperature 1"):
        score(reward(server.url), answered(5, temperature=0.5))
    turns = answered(5)
    turns[0] = replace(turns[0], images=(Image(b"", 0, 1, ()),))
    with pytest.raises(RewardError, match="images"):
        score(reward(server.url), turns)
