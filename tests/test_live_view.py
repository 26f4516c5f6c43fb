"""The table of whole runs, in a terminal of their own; and the other forms of what a run shows."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import time

import pytest
from rlhf.errors import IntendedExit

from tests.forks import Forks
from tests.runs import Workshop

WAIT = 120.0


def in_a_terminal(forks: Forks, arguments: list[str], interrupt: str = "") -> tuple[str, int]:
    """(everything that `rlhf` wrote to a terminal of 80 columns, exit code).

    Args:
        interrupt: Ctrl-C follows this text.
    """
    process, terminal = forks.start_in_terminal(arguments, TERM="xterm", COLUMNS="80", LINES="24")
    output, end = b"", time.monotonic() + WAIT
    try:
        while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                output += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
            if interrupt and interrupt.encode() in output:
                process.kill(signal.SIGINT)
                interrupt = ""
        else:
            process.kill()
    finally:
        os.close(terminal)
    return output.decode(), process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_the_table_and_leaves_the_terminal_as_it_was(shop: Workshop, forks: Forks) -> None:
    reward = shop.file(
        "loud.py", "def score(prompt, completion, row):\n    print('a print of a reward')\n    return 1.0\n"
    )
    changes = {"run": {"steps": 10_000}, "reward": [{"use": f"file:{reward}"}]}
    arguments = shop.arguments(shop.config("rloo", "run", **changes))
    output, code = in_a_terminal(forks, arguments, interrupt="trained tokens/s")
    assert code == 130
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l"), "the cursor is back"
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r", "")
    for line in ("] a print of a reward", "SIGINT: stopping after this step", "stopped: "):
        assert line in text
    assert text.rindex("\n────") < text.index(" steps, in 0:"), "the summary follows the table"


def test_quiet_and_json(shop: Workshop) -> None:
    quiet = shop.train("sft", "quiet", "--quiet")
    assert quiet.out == ""
    assert [line for line in quiet.err.splitlines() if not line.startswith("note: ")] == []
    machine = shop.train("sft", "json", "--json")
    *steps, end = map(json.loads, machine.out.splitlines())
    assert steps == [json.loads(line) for line in (machine.path / "metrics.jsonl").read_text().splitlines()]
    assert end == {"status": "finished", "path": str(machine.path), "steps": 3}
    with pytest.raises(IntendedExit):
        shop.run("sft", "both", "--json", "--quiet")
