"""The HTTP reward: the protocol, servers that fail, and answers that are not understood."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket

import pytest
from pydantic import ValidationError
from reward_server import RewardServer, lengths
from rlhf.errors import ConfigError, RewardError
from rlhf.interfaces import RewardContext, Tokens
from rlhf.proxies import exempt_loopback
from rlhf.types import Group, Image, RewardResult, Row, Trajectory, Turn
from rlhf_plugin_http import HttpReward, servers


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(servers, "PAUSE", 0.0)


@pytest.fixture
def server():
    with RewardServer() as instance:
        yield instance


@pytest.fixture
def other():
    with RewardServer() as instance:
        yield instance


def group(*answers: str, **columns) -> Group:
    row = Row(columns, "unit", 0)
    turns = [[Turn([1], False, text="Q:"), Turn([2], True, text=answer)] for answer in answers]
    return Group(row, 0, [Trajectory(row, t, (0, n)) for n, t in enumerate(turns)])


def make_reward(*servers: RewardServer | str, **options) -> HttpReward:
    urls = tuple(address if isinstance(address, str) else address.url for address in servers)
    return HttpReward(HttpReward.Config(urls=urls, **options))


def score(reward: HttpReward, *answers: str, **columns) -> list[RewardResult]:
    return asyncio.run(reward.score(group(*answers, **columns)))


def closed() -> str:
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_a_group_is_one_request_with_queries_prompts_and_labels(server) -> None:
    assert [r.value for r in score(make_reward(server), "a", "bcd", answer="4")] == [3.0, 5.0]
    assert server.asked == [{"query": ["Q:a", "Q:bcd"], "prompts": ["Q:", "Q:"], "labels": ["4", "4"]}]


@pytest.mark.parametrize(
    ("columns", "label", "value"),
    [({"label": 1, "answer": 2}, None, 1), ({}, None, ""), ({"label": 1, "gold": [7]}, "gold", [7])],
)
def test_labels_are_the_column_asked_for(server, columns, label, value) -> None:
    score(make_reward(server, label=label), "a", **columns)
    assert server.asked[0]["labels"] == [value]


def test_a_missing_column_is_named(server) -> None:
    with pytest.raises(RewardError, match=r"sends the column 'gold' as labels; the row has \['answer'\]"):
        score(make_reward(server, label="gold"), "a", answer="4")


def test_scores_and_logs_are_kept_beside_the_rewards(server) -> None:
    server.reply = lambda _: (
        200,
        json.dumps({"rewards": [1, 2.5], "scores": [0, 1], "extra_logs": {"len": [3, 4]}}).encode(),
    )
    assert score(make_reward(server), "a", "b") == [
        RewardResult(1.0, 0.0, info={"len": 3.0}),
        RewardResult(2.5, 1.0, info={"len": 4.0}),
    ]


def test_the_token_is_sent_and_never_shown(server, monkeypatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    reward = make_reward(server, token_env="REWARD_TOKEN")
    score(reward, "a")
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(reward.config)


def test_a_server_of_this_machine_is_not_asked_through_a_proxy(server, monkeypatch) -> None:
    monkeypatch.setattr("os.environ", {**os.environ, "HTTP_PROXY": closed()})
    exempt_loopback()
    assert [r.value for r in score(make_reward(server), "a")] == [3.0]


def test_a_token_that_is_not_set_is_refused(server, monkeypatch) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="token_env = 'REWARD_TOKEN', but this environment variable is not set"):
        make_reward(server, token_env="REWARD_TOKEN")


@pytest.mark.parametrize("value", ["s3cret\n", " s3cret", "s3crét"])
def test_a_token_that_no_header_can_hold_is_refused_and_never_shown(server, monkeypatch, value) -> None:
    monkeypatch.setenv("REWARD_TOKEN", value)
    with pytest.raises(ConfigError, match=r"REWARD_TOKEN.*a space, a line break or a character") as caught:
        make_reward(server, token_env="REWARD_TOKEN")
    assert "s3cr" not in str(caught.value)


def test_special_tokens_are_sent_if_asked(server) -> None:
    """The text of all tokens, so that a reward model can read them again."""
    names = {1: "<user>Q:", 2: "A<end>"}
    tokens = Tokens(lambda _: [], lambda ids: "".join(names[i] for i in ids))
    reward = make_reward(server, special_tokens=True)
    assert (reward.reads, make_reward(server).reads) == ("tokens", "text")

    async def ask() -> None:
        await reward.setup(RewardContext(tokens=tokens))
        await reward.score(group("A"))

    asyncio.run(ask())
    assert server.asked[0]["query"] == ["<user>Q:A<end>"]
    assert server.asked[0]["prompts"] == ["<user>Q:"]


def test_servers_are_asked_in_turn(server, other) -> None:
    reward = make_reward(server, other)
    for _ in range(4):
        score(reward, "a")
    assert (len(server.asked), len(other.asked)) == (2, 2)


def test_a_server_that_does_not_get_the_images_of_samples_is_reported_once(server, caplog) -> None:
    reward, samples = make_reward(server), group("red", "blue")
    asyncio.run(reward.score(samples))
    assert not caplog.messages
    samples.trajectories[0].turns[0].images = (Image(b"", 0, 1, [1]),)
    for _ in range(2):
        asyncio.run(reward.score(samples))
    [message] = caplog.messages
    assert message == "reward 'http': samples have images, which the server does not see: it gets texts only."


@pytest.mark.parametrize("failure", ["closed", "busy", "slow", "damaged"])
def test_a_server_that_fails_is_left_out_and_named_once(server, other, failure, caplog) -> None:
    other.reply = {
        "closed": lengths,
        "busy": lambda _: (503, b"overloaded"),
        "slow": lambda q: (other.leave.wait(60), lengths(q))[1],
        "damaged": lambda _: (200, b"not gzip"),
    }[failure]
    other.encoding = "gzip" if failure == "damaged" else None
    url = closed() if failure == "closed" else other.url
    reward = make_reward(url, server, timeout=1.0 if failure == "slow" else 20.0)
    with caplog.at_level(logging.WARNING):
        assert [score(reward, "a")[0].value for _ in range(3)] == [3.0] * 3
    assert len(server.asked) == 3
    assert len(other.asked) == (failure != "closed"), "not asked again while it is left out"
    [line] = caplog.messages
    assert f"reward 'http': {url}: " in line
    assert "The server is not used for 30 s." in line


def test_a_server_that_answers_again_is_used_again(server) -> None:
    server.reply = lambda _: (503, b"")
    reward = make_reward(server, attempts=2)
    with pytest.raises(RewardError, match=r"no server answered in 2 attempts: http.*HTTP status 503"):
        score(reward, "a")
    assert len(server.asked) == 2
    server.reply = lengths
    assert score(reward, "a")[0].value == 3.0


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", "answered '<html>hello</html>', which is not JSON"),
        (200, b"[" * 100_000, "which is not JSON"),
        (200, b'{"rewards": [NaN]}', "NaN is a number that is not finite"),
        (200, b'{"rewards": [1e999]}', r"answered float inf as rewards\[0\]. The reward expects a finite number"),
        (200, b'{"rewards": [1' + b"0" * 400 + b"]}", r"as rewards\[0\]. The reward expects a finite number"),
        (200, b'{"rewards": [1, 2]}', "answered 2 values as 'rewards' of 1 samples"),
        (200, b'{"rewards": "1"}', "answered str '1' as 'rewards' of 1 samples"),
        (200, b'{"rewards": [true]}', r"answered bool True as rewards\[0\]"),
        (200, b'{"rewards": [1], "scores": []}', "answered 0 values as 'scores' of 1 samples"),
        (200, b'{"rewards": [1], "extra_logs": {"x": ["a"]}}', r"answered str 'a' as extra_logs.x\[0\]"),
        (200, b'{"rewards": [1], "extra_logs": [1]}', "The reward expects an object of lists"),
        (200, b'{"reward": [1]}', "The reward expects an object with the key 'rewards'"),
        (200, b" " * (10 * 2**20 + 1), "answered more than 10 MiB"),
        (302, b"", "answered with HTTP status 302"),
        (404, b"nothing here", "answered with HTTP status 404: 'nothing here'"),
    ],
)
def test_an_answer_that_is_not_understood_is_an_error_at_once(server, status, body, message) -> None:
    server.reply = lambda _: (status, body)
    with pytest.raises(RewardError, match=message):
        score(make_reward(server), "a")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (("ftp://x",), "must begin with http"),
        (("http://x", "http://x"), "the same address is given twice"),
        ((), "at least 1 item"),
    ],
)
def test_addresses_are_checked(urls, message) -> None:
    with pytest.raises(ValidationError, match=message):
        HttpReward.Config(urls=urls)
