"""Episodes on resources servers of nemo-gym 0.4.0 itself, with rows that it brings.

It needs Python 3.12 and is installed into a virtual environment of its own: 1.1 GB, some minutes.
``NEMO_GYM_PYTHON`` names the Python of an environment that has it already.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from rlhf.errors import EnvError
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row
from rlhf_plugin_nemo_gym import NemoGym
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.samples.episodes import Episodes

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).with_name("serve_example.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> str:
    if setting := os.environ.get("NEMO_GYM_PYTHON"):
        return setting
    newer = next(filter(None, map(shutil.which, ("python3.12", "python3.13"))), None)
    if newer is None or subprocess.run([newer, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("nemo-gym 0.4.0 needs Python 3.12 or newer")
    folder = tmp_path_factory.mktemp("nemo_gym")
    subprocess.run([newer, "-m", "venv", folder], check=True)
    interpreter = str(folder / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", "nemo-gym==0.4.0"], check=True, capture_output=True)
    return interpreter


@pytest.fixture
def serve(python):
    """``serve(name)``: the server's address, the first row that NeMo Gym has for it, and the process."""
    started = []

    def start(name: str) -> tuple[str, dict, subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        process = subprocess.Popen([python, "-P", str(PROGRAM), name, str(port)], env={"PATH": ""})
        started.append(process)
        last = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < last:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        code = "import resources_servers, pathlib; print([*resources_servers.__path__][0])"
        home = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        rows = Path(home, name, "data", "example.jsonl").read_text().splitlines()
        return f"http://127.0.0.1:{port}", json.loads(rows[0]), process

    yield start
    for process in started:
        process.kill()
        process.wait()


async def play(url: str, row: dict, *actions: str) -> list[EnvStep]:
    resolved = Plugins.discover().resolve("env", "nemo_gym")
    opened = Episodes(resolved, NemoGym.Config(url=url), EnvSection(use="nemo_gym")).open()
    try:
        await opened.reset(Row(row, "example", 0), 0)
        return [await opened.step(a) for a in actions]
    finally:
        await opened.close()


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_session_keeps_its_state_and_is_verified(serve) -> None:
    url, row, process = serve("example_session_state_mgmt")

    async def scenario():
        adding = [call("increment_counter", count=n) for n in (1, 2)]
        right = play(url, row, *adding, call("get_counter_value"), "The count is 6.")
        return await asyncio.gather(right, play(url, row, adding[0], "The count is 4."))

    (*_, result, right), (*_, wrong) = asyncio.run(scenario())
    assert result.observation == '<tool_response>\n{"count":6}\n</tool_response>'
    assert (right.reward, right.done, wrong.reward, wrong.done) == (1.0, True, 0.0, True)
    refused = asyncio.run(play(url, row, call("increment_counter", count="one")))
    assert "unable to parse string as an integer" in refused[0].observation
    process.kill()
    process.wait()
    with pytest.raises(EnvError, match="connection attempts failed"):
        asyncio.run(play(url, row))


def test_arguments_of_calls_are_what_the_server_verifies(serve) -> None:
    url, row, _ = serve("example_multi_step")
    values = row["expected_synonym_values"]
    actions = [call("get_synonym_value", synonym=row["expected_synonyms"][0])]
    actions += [call("extract_synonym_values", synonym_values=values), "Done."]
    steps = asyncio.run(play(url, row, *actions))
    assert steps[0].observation == f'<tool_response>\n{{"synonym_value":{values[0]}}}\n</tool_response>'
    assert (steps[-1].reward, steps[-1].info["set_overlap"]) == (1.0, 1.0)
    actions[1] = call("extract_synonym_values", synonym_values=[*values[:-1], 1])
    assert asyncio.run(play(url, row, *actions))[-1].reward == 0.0


def test_a_single_call(serve) -> None:
    url, row, _ = serve("example_single_tool_call")
    steps = asyncio.run(play(url, row, call("get_weather", city="Oslo"), "Cold."))
    assert "The weather in Oslo is cold." in steps[0].observation
    assert (steps[1].reward, steps[1].done) == (1.0, True)
