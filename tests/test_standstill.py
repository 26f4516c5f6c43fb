"""A reward blocks the event loop forever, and a scheduler sends SIGTERM. The run is in its own process."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.runs import Finished, Workshop, assert_same_run

pytestmark = pytest.mark.full

REWARD = """
from pathlib import Path


async def score(prompt, completion, row):
    if Path({block!r}).exists():
        Path({blocked!r}).touch()
        while True:
            pass
    return sum(c in "0123456789" for c in completion) / 6
"""


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_run_ends_after_a_signal_even_if_a_reward_blocks(shop: Workshop) -> None:
    """The run exits with the code of the signal, names the reward's line, and saves every finished step."""
    metrics, block, blocked = shop.folder / "run/metrics.jsonl", shop.folder / "block", shop.folder / "blocked"
    text = REWARD.format(block=str(block), blocked=str(blocked))
    reward = [{"use": f"file:{shop.file('blocking.py', text)}"}]
    config = shop.config("rloo", "run", run={"steps": 40}, reward=reward)
    command = [sys.executable, "-m", "rlhf_cli.main", *shop.arguments(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(process, lambda: metrics.exists() and metrics.stat().st_size > 0)
        block.touch()
        wait_for(process, blocked.exists)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    stopped = Finished(shop.folder / "run", process.returncode, out, err)
    assert stopped.code == 128 + signal.SIGTERM, stopped.said
    line = text.splitlines().index("        while True:") + 1
    assert "SIGTERM asked the run to stop, but score() at " in err + out
    assert any(f"score() at {shop.folder / 'blocking.py'}:{n}" in err + out for n in (line, line + 1)), stopped.said
    assert f"stopped: {stopped.path}" in out
    done = len(stopped.lines())
    assert 1 <= done < 40
    assert stopped.last_checkpoint.name == f"step-{done:06d}"
    block.unlink()
    assert shop.run_config(config, "--resume").code == 0
    baseline = shop.train("rloo", "whole", run={"steps": 40}, reward=reward)
    assert_same_run(Finished(stopped.path, 0), baseline)
