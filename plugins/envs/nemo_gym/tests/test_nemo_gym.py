"""The protocol, and every failure of a server as a failed sample. Episodes are opened as in a run."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
from gym_server import GymServer, row
from pydantic import ValidationError
from rlhf.errors import EnvError
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row
from rlhf_plugin_nemo_gym import NemoGym
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes


async def episode(url: str, *actions: str, columns=None, deadline: float = 20.0, **options) -> list[EnvStep]:
    resolved = Plugins.discover().resolve("env", "nemo_gym")
    section = EnvSection(use="nemo_gym", deadline=deadline)
    opened = Episodes(resolved, NemoGym.Config(url=url, **options), section).open()
    try:
        assert await opened.reset(Row(row() if columns is None else columns, "unit", 0), 0) == ""
        return [await opened.step(a) for a in actions]
    finally:
        await opened.close()


def play(*arguments, **options) -> list[EnvStep]:
    return asyncio.run(episode(*arguments, **options))


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_an_episode() -> None:
    with GymServer() as server:
        first, second, last = play(
            server.url,
            "<think>\nTwo.\n</think>\n\nI add." + call("add", '{"count": 2}'),
            call("get") + call("get"),
            "It is 3.",
        )
    result = '<tool_response>\n{"count": 3}\n</tool_response>'
    assert first == EnvStep(result)
    assert second == EnvStep(f"{result}\n{result}")
    assert last == EnvStep("", 1.0, True, info={"count": 3})
    assert [path for path, _ in server.asked] == ["seed_session", "add", "get", "get", "verify"]
    assert server.asked[0][1] == row()
    verified = server.asked[-1][1]
    assert {k: v for k, v in verified.items() if k != "response"} == row()
    output = verified["response"]["output"]
    kinds = ["reasoning", "message", "function_call", "function_call_output"]
    assert [item["type"] for item in output] == [
        *kinds, "function_call", "function_call", "function_call_output", "function_call_output", "message",
    ]  # fmt: skip
    assert output[0]["summary"][0]["text"] == "Two."
    assert (output[1]["content"][0]["text"], output[2]["arguments"]) == ("I add.", '{"count": 2}')
    assert output[3] == {"type": "function_call_output", "call_id": output[2]["call_id"], "output": '{"count": 3}'}
    assert len({item["call_id"] for item in output if item["type"] == "function_call"}) == 3


def test_episodes_have_sessions_of_their_own() -> None:
    async def play_pair(url: str):
        adding = [call("add", '{"count": 1}')] * 2
        return await asyncio.gather(episode(url, *adding, "done"), episode(url, *adding, "done"))

    with GymServer() as server:
        assert [steps[-1].info["count"] for steps in asyncio.run(play_pair(server.url))] == [3, 3]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("<tool_call>add 2</tool_call>", "the tool call is not JSON"),
        ('<tool_call>{"name": "add", "arguments": {"count": NaN}}</tool_call>', "not JSON: NaN"),
        ('<tool_call>{"name": "add", "arguments": "2"}</tool_call>', "a tool call is "),
        (call("verify"), "no tool 'verify'; tools: add, get"),
        (call("../seed_session"), "no tool '../seed_session'"),
        (call("add", '{"count": "two"}'), '{"detail":"count: not an integer"}'),
    ],
)
def test_a_wrong_tool_call_is_told_to_the_policy(action: str, message: str) -> None:
    with GymServer() as server:
        (step,) = play(server.url, action)
    assert message in step.observation
    assert (step.done, step.reward) == (False, 0.0)
    assert [path for path, _ in server.asked] == ["seed_session", *(["add"] if "two" in action else [])]


def test_tags_without_an_end_are_searched_in_linear_time() -> None:
    """A million characters take a moment; in quadratic time they would take an hour."""
    program = (
        "from rlhf_plugin_nemo_gym import parsed\n"
        "text = '<tool_call>' * 100_000\n"
        "assert parsed(text, 0, set()).content == text\n"
        "answer = parsed('a' + text + '</tool_call>b' + text, 0, set())\n"
        "assert (len(answer.calls), answer.content) == (1, 'ab' + text)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_episode_that_uses_all_steps_is_verified() -> None:
    with GymServer() as server:
        steps = play(server.url, call("add", '{"count": 1}'), call("add", '{"count": 1}'), max_steps=2)
    assert (steps[0].done, steps[1].done, steps[1].reward) == (False, True, 1.0)


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ({"seed_session": (500, b"boom")}, r"/seed_session answered with HTTP status 500: 'boom'"),
        ({"seed_session": (422, b"no")}, "HTTP status 422"),
        ({"add": (500, b"boom")}, r"/add answered with HTTP status 500"),
        ({"add": (404, b"{}")}, r"/add answered with HTTP status 404"),
        ({"add": (302, b"")}, r"/add answered with HTTP status 302"),
        ({"add": (0, b"")}, r"/add: Server disconnected"),
        ({"verify": (0, b"")}, r"/verify: Server disconnected"),
        ({"verify": (200, b"<html>")}, r"/verify answered '<html>', which is not JSON"),
        ({"verify": (200, b"{}")}, "reward = NoneType None; expected a finite number"),
        ({"verify": (200, b'{"reward": NaN}')}, "reward = float nan"),
        ({"verify": (200, b'{"reward": true}')}, "reward = bool True"),
        ({"verify": (200, b"1" + b"0" * 400)}, "reward = NoneType None"),
        ({"verify": (200, b" " * (11 * 2**20))}, "answered more than 10 MiB"),
    ],
)
def test_a_failure_of_the_server_is_an_error_never_a_reward(replies, message: str) -> None:
    with GymServer(**replies) as server, pytest.raises(EnvError, match=message):
        play(server.url, call("add", '{"count": 2}'), "done")


def test_a_server_that_is_absent_or_slow() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EnvError, match=r"/seed_session: .*connection attempts failed"):
            play(f"http://127.0.0.1:{free.getsockname()[1]}")
    with GymServer() as server:
        server.replies["verify"] = lambda: (200, str(server.leave.wait(20)).encode())
        with pytest.raises(EnvError, match=r"took longer than its deadline of 0.3 s"):
            play(server.url, "done", deadline=0.3)


def test_a_row_of_another_form_and_a_wrong_address_are_refused() -> None:
    with GymServer() as server:
        with pytest.raises(EnvError, match="its column 'responses_create_params' is NoneType None; expected an object"):
            play(server.url, columns={"prompt": "x"})
        with pytest.raises(EnvError, match="the row cannot be written as JSON"):
            play(server.url, columns=row(start=float("nan")))
    with pytest.raises(ValidationError, match="is not a web address"):
        NemoGym.Config(url="h:1")
