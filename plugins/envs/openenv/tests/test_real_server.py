"""Episodes on the server of openenv-core 0.3.0 itself, which is installed into a virtual environment of its own."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlhf.errors import EnvError
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row
from rlhf_plugin_openenv import OpenEnv
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episode, Episodes

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).with_name("counting_env.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    """Asks a package index."""
    folder = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    interpreter = str(folder / "bin" / "python")
    subprocess.run(
        [interpreter, "-m", "pip", "install", "--quiet", "openenv-core==0.3.0"], check=True, capture_output=True
    )
    return interpreter


@pytest.fixture
def server(python):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, "-P", str(PROGRAM), str(port)], env={"PATH": ""})
    last = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < last:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def opened(url: str, deadline: float = 20.0, **options) -> Episode:
    config = OpenEnv.Config(
        url=url, **{"action_field": "message", "observation_field": "text", "reset": ("seed",)} | options
    )
    resolved = Plugins.discover().resolve("env", "openenv")
    return Episodes(resolved, config, EnvSection(use="openenv", deadline=deadline)).open()


async def play(url: str, *actions: str, deadline: float = 20.0, **options) -> tuple[str, list[EnvStep]]:
    episode = opened(url, deadline, **options)
    try:
        opening = await episode.reset(Row({"seed": 3}, "unit", 0), 0)
        return opening, [await episode.step(a) for a in actions]
    finally:
        await episode.close()


def test_episodes(server) -> None:
    opening, steps = asyncio.run(play(server, "3", "5"))
    assert opening == "Count from 3."
    assert [(s.observation, s.reward, s.done) for s in steps] == [("right", 1.0, False), ("wrong", 0.0, True)]
    opening, steps = asyncio.run(play(server, '{"message": "3"}', "3", action_field=None, observation_field=None))
    assert opening == '{"text": "Count from 3."}'
    assert steps[0].observation == '{"text": "right"}'
    assert steps[1].observation.startswith("Invalid action: ")


def test_what_the_policy_got_wrong_is_told_and_what_the_server_got_wrong_is_an_error(server) -> None:
    _, (step,) = asyncio.run(play(server, "x" * 21))
    assert step.observation.startswith("Invalid action: message: String should have at most 20 characters")
    with pytest.raises(EnvError, match=r"field 'text' \(action_field\): message: Field required"):
        asyncio.run(play(server, "3", action_field="text"))
    with pytest.raises(EnvError, match=r"step\(\): the server answered the error EXECUTION_ERROR: the environment is"):
        asyncio.run(play(server, "raise"))
    with pytest.raises(EnvError, match=r"took longer than its deadline of 1 s"):
        asyncio.run(play(server, "sleep", deadline=1.0))


def test_sessions_are_free_again_as_soon_as_an_episode_is_closed(server) -> None:
    async def scenario() -> None:
        for _ in range(10):
            await asyncio.gather(play(server, "3"), play(server, "3"))
        with pytest.raises(EnvError, match=r"error CAPACITY_REACHED: .*Set `concurrency`"):
            await asyncio.gather(*(play(server, "3", "4") for _ in range(8)))

    asyncio.run(scenario())


def test_a_server_that_dies_in_an_episode_is_an_error(server) -> None:
    with pytest.raises(EnvError, match=r"step\(\): no close frame received"):
        asyncio.run(play(server, "3", "die"))
    with pytest.raises(EnvError, match=r"connecting: "):
        asyncio.run(play(server))
