"""The protocol, and every failure of a server as a failed sample. Episodes are opened as in a run."""

from __future__ import annotations

import asyncio
import socket

import pytest
from openenv_server import OpenEnvServer, observation
from pydantic import ValidationError
from rlhf.errors import EnvError
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row
from rlhf_plugin_openenv import OpenEnv
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes


def play(url: str, *actions: str, columns=None, deadline: float = 20.0, **options) -> tuple[str, list[EnvStep]]:
    async def episode():
        config = OpenEnv.Config(url=url, **{"action_field": "guess", "observation_field": "text"} | options)
        resolved = Plugins.discover().resolve("env", "openenv")
        opened = Episodes(resolved, config, EnvSection(use="openenv", deadline=deadline)).open()
        try:
            opening = await opened.reset(Row(columns or {}, "unit", 0), 2**40 + 3)
            return opening, [await opened.step(a) for a in actions]
        finally:
            await opened.close()

    return asyncio.run(episode())


def test_an_episode() -> None:
    with OpenEnvServer() as server:
        opening, steps = play(server.url, "1", "2")  # seed 3 hides 2
    assert opening == "Guess 1 to 6."
    assert steps == [
        EnvStep("no", 0.0, False, info={"valid": True}),
        EnvStep("yes", 1.0, True, info={"valid": True}),
    ]
    assert server.asked == [
        {"type": "reset", "data": {"seed": 3}},
        {"type": "step", "data": {"guess": "1"}},
        {"type": "step", "data": {"guess": "2"}},
        {"type": "close"},
    ]


def test_columns_of_the_row_are_sent_with_reset() -> None:
    with OpenEnvServer() as server:
        play(server.url, columns={"seed": 9, "task": [1]}, reset=("seed", "task"))
        with pytest.raises(EnvError, match=r"no column 'task' \(option `reset`\); the row has seed"):
            play(server.url, columns={"seed": 9}, reset=("seed", "task"))
        with pytest.raises(EnvError, match="reset message cannot be written as JSON"):
            play(server.url, columns={"task": float("nan")}, reset=("task",))
    assert server.asked[0] == {"type": "reset", "data": {"seed": 9, "task": [1]}}


def test_whole_actions_and_observations_are_json() -> None:
    with OpenEnvServer() as server:
        opening, steps = play(
            server.url,
            '{"guess": "2"}',
            action_field=None,
            observation_field=None,
            columns={"seed": 3},
            reset=("seed",),
        )
    assert (opening, steps[0].observation, steps[0].done) == ('{"text": "Guess 1 to 6."}', '{"text": "yes"}', True)


@pytest.mark.parametrize("action", ["two", "[1]", '{"guess": NaN}', '{"guess": "2"} ', "[" * 100_000, ""])
def test_a_turn_that_is_no_action_is_told_to_the_policy_and_never_sent(action: str) -> None:
    with OpenEnvServer() as server:
        _, (step,) = play(server.url, action, action_field=None, invalid_reward=-0.5)
    valid = action.startswith('{"guess": "2"}')
    assert (step.info["valid"], step.done) == (valid, valid)
    assert step.reward == (1.0 if valid else -0.5)
    assert step.observation.startswith("yes" if valid else "Invalid action: ")
    assert [m["type"] for m in server.asked] == (["reset", "step", "close"] if valid else ["reset", "close"])


def refused(**error):
    def reply(request):
        if request["type"] == "reset":
            return observation(text="go")
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [error]}}

    return lambda: reply


def test_an_action_that_the_server_refuses_is_told_to_the_policy() -> None:
    with OpenEnvServer(refused(type="string_pattern_mismatch", loc=["guess"], msg="should match [1-6]")) as server:
        _, (step,) = play(server.url, "7")
    assert step == EnvStep("Invalid action: guess: should match [1-6]", 0.0, info={"valid": False})


def test_a_wrong_action_field_is_an_error_not_an_invalid_action() -> None:
    with (
        OpenEnvServer(refused(type="extra_forbidden", loc=["guess"], msg="Extra inputs are not permitted")) as server,
        pytest.raises(EnvError, match=r"field 'guess' \(action_field\): guess: Extra inputs.*GET /schema"),
    ):
        play(server.url, "7")


def at_step(answer):
    return lambda: lambda request: observation(text="go") if request["type"] == "reset" else answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"step\(\): no close frame received or sent"),
        ("<html>", r"step\(\): the server answered str '<html>', which is not JSON"),
        (b"\xff", r"step\(\): the server answered bytes"),
        ("[1]", r"expected a message of the type observation or error"),
        ({"type": "state", "data": {}}, r"expected a message of the type observation or error"),
        ({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "boom"}}, "error EXECUTION_ERROR: boom"),
        ({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}, r"full. Set `concurrency` in"),
        (observation("1", text=""), "reward = str '1'; expected a finite number"),
        ('{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": false}}', "NaN is not JSON"),
        ({"type": "observation", "data": {"observation": {}, "done": True}}, "reward = NoneType None"),
        (observation(10**400, text=""), "expected a finite number"),
        (observation(1.0, "yes", text=""), "done = str 'yes'; expected true or false"),
        ({"type": "observation", "data": {"observation": "x", "reward": 1.0, "done": True}}, "expected an object"),
        (observation(1.0, True, other=1), r"no field 'text' \(observation_field\); its fields are other"),
        ("x" * (11 * 2**20), r"step\(\): .*message too big|1009"),
        (..., r"step\(\) took longer than its deadline of 0.3 s"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_a_failure_of_the_server_is_an_error_never_a_reward(answer, message: str) -> None:
    with OpenEnvServer(at_step(answer)) as server, pytest.raises(EnvError, match=message):
        play(server.url, "1", deadline=0.3 if answer is ... else 20.0)


def test_a_server_that_ends_the_session_before_it_is_asked_again_says_why() -> None:
    error = {"type": "error", "data": {"code": "SESSION_ERROR", "message": "shutting down"}}

    async def scenario(url: str) -> None:
        env = OpenEnv(OpenEnv.Config(url=url, action_field="message", observation_field="text"))
        try:
            assert await env.reset(Row({}, "s", 0), 1) == "go"
            await env._connection.wait_closed()
            await env.step("3")
        finally:
            await env.close()

    with (
        OpenEnvServer(lambda: lambda request: [observation(text="go"), error]) as server,
        pytest.raises(EnvError, match=r"step\(\): the server answered the error SESSION_ERROR: shutting down"),
    ):
        asyncio.run(scenario(server.url))


def test_a_server_that_is_absent_or_full_or_done_at_once() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EnvError, match=r"ws://127.0.0.1:\d+/ws: connecting: .*(refused|failed)"):
            play(f"http://127.0.0.1:{free.getsockname()[1]}")
    full = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "1 of 1"}}
    with (
        OpenEnvServer(lambda: lambda request: full) as server,
        pytest.raises(EnvError, match=r"1 of 1\. Set `concurrency`"),
    ):
        play(server.url)
    with (
        OpenEnvServer(lambda: lambda request: observation(text="", done=True)) as server,
        pytest.raises(EnvError, match="done = true, so there is no episode"),
    ):
        play(server.url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "ws://h:1/ws"), ("https://h/env/", "wss://h/env/ws"), ("ws://h:1/ws", "ws://h:1/ws"),
        ("wss://h/ws/", "wss://h/ws"),
    ],
)  # fmt: skip
def test_addresses(url: str, expected: str) -> None:
    assert OpenEnv.Config(url=url).url == expected


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="is not the address of a server"):
        OpenEnv.Config(url=url)
