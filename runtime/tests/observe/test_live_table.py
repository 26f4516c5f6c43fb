"""The table on a terminal: it stays in place, and what is written scrolls above it."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_runtime.observe.live_table import LiveTable, short, sparkline
from rlhf_runtime.observe.progress import Progress

SAMPLES = {
    "reward/mean": 0.5, "kl/reference": 0.001, "length/mean": 93.2, "policy/entropy": 1.25, "policy/grad_norm": 0.3,
    "throughput/sampled": 12345.0, "throughput/trained": 23456.0, "memory/driver/process": 1.5,
    "memory/policy/cuda": 7.0, "time/step": 5.0, "time/evaluate": 1.0, "time/generate": 2.0, "time/learn": 1.0,
    "time/sync": 0.4, "time/annotate": 0.5,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def screen(self) -> list[str]:
        """The lines that a terminal shows, by the control codes that the table uses."""
        lines, row, column = [""], 0, 0
        for text, code, amount in re.findall(r"([^\x1b\r\n]+|\r|\n)|\x1b\[\??([0-9;]*)([a-zA-Z])", self.getvalue()):
            if text == "\r":
                column = 0
            elif text == "\n":
                row, column = row + 1, 0
                lines += [""] * (row == len(lines))
            elif amount == "A":
                row -= int(code or 1)
            elif (amount, code) == ("K", "2"):
                lines[row] = ""
            elif text:
                lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
                column += len(text)
        return lines


def group(reward: float) -> Group:
    row = Row({}, "sums", 0)
    turns = [Turn([1], False, text="1+1="), Turn([2, 3], True, text="answer\x1b[2J")]
    return Group(row, 0, [Trajectory(row, turns, (0, 0), reward=reward)])


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(getattr(request, "param", 80)))
    monkeypatch.setenv("LINES", "30")
    return Terminal()


WIDTHS = pytest.mark.parametrize("terminal", [80, 60, 160], indirect=True)


def table_lines(lines: list[str]) -> list[str]:
    """The table."""
    return lines[max(n for n, line in enumerate(lines) if line.startswith("───")) :]


@WIDTHS
def test_a_table_shows_progress_metrics_times_memory_sample_and_notes(terminal: Terminal) -> None:
    progress = Progress(4, stream=terminal)
    progress.begin(0)
    for step, reward in enumerate((0.25, 0.5), 1):
        progress.last_sample(step, [group(reward)])
        progress.step(step, {**SAMPLES, "reward/mean": reward})
    progress.note("a [bold]note[/bold]")
    progress._table.refresh()
    table = table_lines(terminal.screen)
    text = "\n".join(table)
    assert table[1].startswith("step 2/4 ")
    assert " 50 %  left 0:00:0" in table[1]
    for line in (r"reward +0.5 ▁█", r"length +93.2", r"entropy +1.25", r"grad norm +0.3", r"kl +0.001",
                 r"sampled tokens/s +12,345", r"time +4 s a step: generate 50 %, learn 25 %, sync 10 %",
                 r"memory +at most driver 1.5 GiB, policy 7 GiB", "sample +step 2, reward 0.5: 1\\+1= -> answer",
                 r"note +a \[bold\]note\[/bold\]"):  # fmt: skip
        assert re.search(line, text), line
    assert max(map(len, table)) <= int(progress._table._console.width)
    progress.close()
    assert "\n".join(terminal.screen).count("reward    ") == 1, "one table stays"


def test_prints_logs_and_urgent_lines_scroll_above(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler, logger = logging.StreamHandler(terminal), logging.getLogger("of a plugin")  # it keeps the stream
    logger.addHandler(handler)
    progress = Progress(2)
    progress.begin(0)
    print("a print")
    print("an error", file=sys.stderr)
    logger.warning("a log line")
    assert progress.urge("SIGINT: stopping")
    progress.step(1, SAMPLES)
    progress.note("a note")
    progress.close()
    logger.removeHandler(handler)
    assert handler.stream is sys.stdout is terminal
    log_lines = terminal.screen[: len(terminal.screen) - len(table_lines(terminal.screen))]
    assert sorted(line for line in log_lines if line) == [
        "SIGINT: stopping", "a log line", "a print", "an error", "note: a note"
    ]  # fmt: skip
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l"), "the cursor is back"


def test_a_redirected_error_stream_keeps_its_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", file)
    progress = Progress(2)
    progress.begin(0)
    print("an error", file=sys.stderr)
    progress.close()
    assert file.getvalue() == "an error\n"
    assert "an error" not in terminal.getvalue()


def test_without_a_table_an_urgent_line_is_left_to_its_caller() -> None:
    assert not Progress(2, stream=io.StringIO()).urge("SIGINT")


def test_a_control_code_of_a_sample_does_nothing(terminal: Terminal) -> None:
    progress = Progress(1, stream=terminal)
    progress.begin(0)
    progress.last_sample(1, [group(1.0)])
    progress.close()
    assert "-> answer\\x1b[2J" in "\n".join(terminal.screen)


@WIDTHS
def test_a_long_sample_has_rows_of_whole_words_which_stay(terminal: Terminal) -> None:
    """An answer of a model with line breaks after each second word; then a short one."""
    row, answer = Row({}, "sums", 0), "\n\n".join(f"word{n} {'漢字' * 3}" for n in range(200))
    turns = [Turn([1], False, text="unseen " * 20 + "the question?\nassistant\n"), Turn([2], True, text=answer)]
    progress = Progress(2, stream=terminal)
    progress.begin(0)
    progress.last_sample(1, [Group(row, 0, [Trajectory(row, turns, (0, 0), reward=1.0)])])
    progress._table.refresh()
    rows = [line for line in table_lines(terminal.screen) if line][2:]
    assert len(rows) == 4
    assert rows[0].startswith("sample  step 1, reward 1: ... unseen unseen"), "from the start of a word"
    words = " ".join(line.strip() for line in rows).split()
    assert "the question? assistant -> word0" in " ".join(words)
    assert words[-1] == "..."
    assert all(line.startswith(" " * 8) for line in rows[1:])
    assert {*words[words.index("->") + 1 : -2]} <= {*answer.split()}, "no word is broken"
    assert max(cell_len(line) for line in rows) <= progress._table._console.width
    progress.last_sample(2, [group(1.0)])
    assert len([*progress._table._sample(80)]) == 4, "the table does not jump"
    progress.close()


def test_a_low_terminal_shows_the_first_lines(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "5")
    progress = Progress(2, stream=terminal)
    progress.begin(0)
    progress.step(1, SAMPLES)
    progress._table.refresh()
    assert len([line for line in table_lines(terminal.screen) if line]) == 4
    progress.close()


def test_a_curve_has_the_means_of_its_values() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert sparkline([0.0, float("nan"), 1.0, 0.5], 8) == "▁█▅"
    assert sparkline([1.0, 1.0], 8) == sparkline([], 8) == sparkline([float("inf")], 8) == ""
    assert [short(v) for v in (0.00012345, 12345.6, 1e9, float("nan"), -3.0)] == [
        "0.000123",
        "12,346",
        "1e+09",
        "nan",
        "-3",
    ]


def test_values_and_notes_may_be_added_while_the_table_is_drawn():
    """The main thread adds them, another thread draws."""
    table = LiveTable(Console(file=io.StringIO(), width=100, height=40), 9, lambda: 0.0)

    class Value:
        def __float__(self):
            table.step(1, {"reward": 2.0}, {})
            return 1.0

    class Text(str):
        def split(self):
            table.note("b")
            return ["a"]

    table.step(1, {"reward": Value()}, {})
    table.step(1, {"reward": 3.0}, {})
    table.note(Text("a"))
    console = Console(file=io.StringIO(), width=100)
    console.print(table._picture())
    assert "reward" in console.file.getvalue()
    assert "note" in console.file.getvalue()
