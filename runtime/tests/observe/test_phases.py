"""Phases of a command: a line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rlhf_runtime.observe.progress import Progress, hidden, muted, phase


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_one_line_a_phase(capsys: pytest.CaptureFixture[str]) -> None:
    with phase("reading [data]"):
        pass
    with phase("answering prompts") as count:
        count(1, 2)
        count(2, 2)
    assert capsys.readouterr() == ("", "reading [data]\nanswering prompts\n")


def test_a_terminal_shows_counts_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with phase("loading models"):
        with hidden():
            terminal.write("note: a note\n")
        with phase("answering prompts") as count:
            count(3, 8)
    text = terminal.getvalue()
    assert "loading models" in text
    assert "answering prompts: 3 of 8" in text
    assert "\x1b[2K" in text.rpartition("loading models")[2], "the last line is erased"


def test_phases_of_the_first_step_and_rare_ones_are_lines_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    progress = Progress(2, stream=out)
    progress.begin(0)
    for step in (1, 2):
        for name in ("generate", "learn", "evaluate"):
            with progress.phase(name):
                pass
        progress.step(step, {"reward/mean": 0.5})
    assert capsys.readouterr().err == "generating\nlearning\nevaluating\nevaluating\n"
    assert out.getvalue().startswith("step=1/2 reward=0.5")


def test_a_table_shows_the_phase_beside_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal, times = Terminal(), iter(range(10000))
    progress = Progress(2, stream=terminal, clock=lambda: next(times))
    progress.begin(0)
    with progress.phase("learn"):
        with progress.phase("annotate"):
            progress._table.refresh()
        progress.count("optimizer step", 1, 4)
        progress.count("micro-batches", 8, 8)
        progress.count("optimizer step", 2, 4)
        progress._table.refresh()
        progress.count("micro-batches", 3, 8)
        progress._table.refresh()
    progress.count("micro-batches", 4, 8)
    with progress.phase("sync"):
        progress._table.refresh()
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    assert re.search(r"learning 0:00:\d\d, optimizer step 2/4\s*\r", text), "its micro-batches begin anew"
    assert ", optimizer step 2/4, micro-batches 3/8" in text
    assert "micro-batches" not in text.rpartition("sending weights")[2], "counts end with their phase"
    assert "computing log-probs and values 0:00:" in text
    assert "learning 0:00:" in text.partition("computing log-probs")[2]


def test_a_command_may_mute_its_phases(capsys: pytest.CaptureFixture[str]) -> None:
    with muted(), phase("reading"):
        pass
    with muted(False), phase("loading"):
        pass
    assert capsys.readouterr().err == "loading\n"
