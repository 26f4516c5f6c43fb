"""The process of an environment ends with the run. The package verifiers is a file of this test here, because these
tests are about processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import orphans

pytestmark = pytest.mark.linux("elsewhere no supervisor ends the process")

DRIVER = """
import asyncio, pathlib, sys
from rlhf_plugin_verifiers.config import VerifiersConfig
from rlhf_plugin_verifiers.process import EnvironmentProcess

async def main():
    process = EnvironmentProcess(VerifiersConfig(id="leaving"))
    play = asyncio.create_task(process.play({}))
    while not (sys.argv[2] == "ends" and pathlib.Path(sys.argv[1]).exists()):
        await asyncio.sleep(0.05)

asyncio.run(main())
"""


@pytest.fixture
def pids(tmp_path, monkeypatch):
    text = f"import time\ndef load_environment(name):\n    {orphans.leaving(tmp_path / 'pids')}\n    time.sleep(600)\n"
    (tmp_path / "verifiers.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "pids"


def test_nothing_outlives_a_driver_that_is_killed_in_mid_call(pids):
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", DRIVER, str(pids), "waits"]), pids)


def test_nothing_outlives_a_command_for_rows_that_is_killed(pids):
    text = "import rlhf_plugin_verifiers.__main__ as rows; rows.check_python = lambda config: None; rows.main()"
    assert orphans.end_with(subprocess.Popen([sys.executable, "-c", text, "leaving"]), pids)


def test_what_an_environment_started_ends_with_the_event_loop(pids):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(pids), "ends"])
    survivors = orphans.left(pids)
    assert driver.wait() == 0
    assert orphans.end(survivors)


SERVE = """
import asyncio, json, sys
from rlhf_plugin_verifiers import environment_process

class Player:
    def __init__(self, environment): ...
    async def play(self, request): await asyncio.sleep(600)

environment_process.Player = Player
asyncio.run(environment_process.serve(0, lambda answer: print(json.dumps(answer)), None))
"""


def test_a_sample_that_is_cancelled_before_it_begins_is_answered():
    """The run kills a process, with all its samples, that does not answer a cancelled sample."""
    requests = '{"number": 1}\n{"number": 1, "cancel": true}\n'
    done = subprocess.run([sys.executable, "-c", SERVE], input=requests, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ('{"number": 1, "failed": "cancelled"}\n', 0), done.stderr
