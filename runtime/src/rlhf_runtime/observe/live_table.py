"""The table of a run on a terminal. It stays in place, and all other output scrolls above it."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rlhf_runtime.observe.sample_lines import printable
from rlhf_runtime.output.metrics import TIME, step_seconds

REFRESH = 0.25
"""Seconds between two pictures."""
NARROW = 76
"""Terminals with fewer columns show one metric per row."""
LABEL, VALUE, CURVE = 18, 9, 24
"""Largest number of columns of a metric's label, value and curve."""
CURVE_POINTS = 200
"""Number of values of a curve. Each of its characters is the mean of an equal number of values."""
NOTES = 2
SAMPLE = 4
"""Largest number of rows of the sample."""
MARGIN = 8
"""Columns before the text of a row."""
BARS = "▁▂▃▄▅▆▇█"
PARTS_OF_A_STEP = ("data", "generate", "learn", "sync")
"""Phases of a step that do not overlap, without its evaluation."""


class LiveTable:
    """Progress, metrics with their curves, times, memory, the last sample and the last notes.

    Args:
        total: steps of the run.
        clock: gives the time in seconds.
    """

    def __init__(self, console: Console, total: int, clock: Callable[[], float]) -> None:
        self._console, self._total, self._clock = console, total, clock
        self.steps_done = 0
        self.left = ""
        """Text about the remaining time."""
        self.phase: tuple[str, float, dict[str, tuple[int, int]]] | None = None
        """(current phase of the step, its start, counts)."""
        self.sample = ""
        self._sample_rows = 0
        self._curves: dict[str, deque[float]] = {}
        self._last: Mapping[str, float] = {}
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._urgent: deque[str] = deque()
        self._end = threading.Event()
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    # ----------------------------------------------------------------------------------- on the terminal

    @property
    def is_active(self) -> bool:
        return self._live is not None

    def start(self) -> None:
        """Show the table. Until :meth:`stop`, output of Python code to the terminal scrolls above it."""
        is_standard = self._console.file in (sys.stdout, sys.stderr)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            get_renderable=self._picture,
            redirect_stdout=is_standard and sys.stdout.isatty(),
            redirect_stderr=is_standard and sys.stderr.isatty(),
        )
        streams = sys.stdout, sys.stderr
        self._live.start(refresh=True)
        # Live replaced sys.stdout and sys.stderr if they are terminals. Handlers of logs still hold the old objects.
        self._redirect_logs({id(a): b for a, b in zip(streams, (sys.stdout, sys.stderr), strict=True) if a is not b})
        threading.Thread(target=self._draw, name="table", daemon=True).start()

    def stop(self) -> None:
        """Leave the last picture on the terminal, and restore the terminal."""
        live, self._live = self._live, None
        if live is None:
            return
        self._end.set()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self.phase = None
        self._write_urgent()
        live.stop()

    def refresh(self) -> None:
        """Draw the table now."""
        if (live := self._live) is not None:
            self._write_urgent()
            live.refresh()

    def urge(self, text: str) -> None:
        """Show a line with the next picture. For signal handlers: they may run in the middle of a print or while a lock
        is held, so nothing is written here."""
        self._urgent.append(text)

    def _draw(self) -> None:
        while not self._end.wait(REFRESH):
            with suppress(ValueError, OSError):  # the terminal is closed; the run continues
                self.refresh()

    def _write_urgent(self) -> None:
        while self._urgent:
            self._console.print(self._urgent.popleft(), soft_wrap=True, markup=False)

    def _redirect_logs(self, streams: Mapping[int, Any]) -> None:
        """Redirect log handlers, because they keep the stream with which they were created.

        Args:
            streams: {id of a stream: its replacement}.
        """
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):  # a placeholder has none
                if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                    self._handlers.append((handler, handler.stream))
                    handler.setStream(streams[id(handler.stream)])

    # ------------------------------------------------------------------------------------------- content

    def step(self, steps_done: int, values: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """A step has ended.

        Args:
            values: {label: value} of the metrics that are shown.
            metrics: the step's line.
        """
        self.steps_done, self._last = steps_done, metrics
        for label, value in values.items():
            self._curves.setdefault(label, deque(maxlen=CURVE_POINTS)).append(value)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def _picture(self) -> RenderableType:
        width = self._console.width
        lines = [Text("─" * width, "dim"), self._progress(width), *self._metrics(width)]
        for label, text in (("time", self._times()), ("memory", self._memory())):
            if text:
                lines.append(_row(label, text))
        lines += self._sample(width)
        lines += [_row("note", text, "yellow") for text in list(self._notes)]
        # The terminal cannot erase lines that have scrolled out of it, so a taller table would be printed again and
        # again.
        lines = lines[: max(2, self._console.height - 1)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis" if self._plain_text("…") else "crop"
        return Group(*lines)

    def _progress(self, width: int) -> Text:
        share = self.steps_done / self._total if self._total else 1.0
        size = max(6, min(24, width // 5))
        full, rest = ("━", "─") if self._plain_text("━") else ("#", "-")
        line = Text(f"step {self.steps_done}/{self._total} ")
        line.append(full * round(share * size), "green").append(rest * (size - round(share * size)), "dim")
        line.append(f" {100 * share:.0f} %  {self.left}")
        if self.phase is not None:
            text, start, counts = self.phase
            parts = [f"{text} {timedelta(seconds=int(self._clock() - start))}"]
            parts += [f"{label} {number}/{total}" for label, (number, total) in counts.items()]
            line.append("  " + ", ".join(parts), "dim")
        return line

    def _metrics(self, width: int) -> Iterator[Text]:
        columns = 2 if width >= NARROW else 1
        labels = list(self._curves)
        rows, size = -(-len(labels) // columns), min(CURVE, width // columns - LABEL - VALUE - 2)
        for row in range(rows):
            line = Text()
            for label in labels[row::rows]:
                values = list(self._curves[label])  # a copy: the main thread adds values while this thread draws
                line.append(f"{label[: LABEL - 1]:<{LABEL}}", "bold")
                line.append(f"{short(values[-1]):>{VALUE}} ", "" if math.isfinite(values[-1]) else "red")
                line.append(f"{sparkline(values, size) if self._plain_text(BARS) else '':<{size}} ", "cyan")
            yield line

    def _times(self) -> str:
        seconds = step_seconds(self._last)
        if seconds <= 0:
            return ""
        spent = {phase: self._last.get(f"{TIME}{phase}", 0.0) for phase in PARTS_OF_A_STEP}
        spent["rest"] = max(0.0, seconds - sum(spent.values()))
        shares = [f"{phase} {100 * s / seconds:.0f} %" for phase, s in spent.items() if s / seconds >= 0.005]
        evaluating = f", evaluation {evaluate:.3g} s" if (evaluate := self._last.get(f"{TIME}evaluate")) else ""
        return f"{seconds:.3g} s a step: {', '.join(shares)}{evaluating}"

    def _memory(self) -> str:
        peaks = []
        for name, value in self._last.items():
            place, _, rest = name.partition("/")
            if place == "memory":
                part, _, kind = rest.rpartition("/")
                peaks.append(f"{part} {value:.3g} GiB{' of its GPU' if kind == 'cuda' else ''}")
        return "at most " + ", ".join(peaks) if peaks else ""

    def _sample(self, width: int) -> Iterator[Text]:
        """As many rows as the longest sample so far, so that the table does not jump."""
        if not self.sample:
            return
        text = printable(" ".join(self.sample.split()))
        rows = list(Text(text[: SAMPLE * width]).wrap(self._console, width - MARGIN))
        if len(rows) > SAMPLE:
            rows = rows[:SAMPLE]
            rows[-1].truncate(width - MARGIN - 4)
            rows[-1].append(" ...")
        self._sample_rows = max(self._sample_rows, len(rows))
        for number in range(self._sample_rows):
            label = "sample" if number == 0 else ""
            yield Text.assemble((f"{label:<{MARGIN}}", "bold"), rows[number] if number < len(rows) else "")

    def _plain_text(self, characters: str) -> bool:
        """Whether the terminal has these characters."""
        try:
            characters.encode(self._console.encoding)
        except (UnicodeEncodeError, LookupError):
            return False
        return True


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:<{MARGIN}}", "bold"), (printable(" ".join(text.split())), style))


def short(value: float) -> str:
    """A number in at most nine characters."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of ``width`` characters. Each is the mean of an equal number of values. Values that are not finite are
    left out. The curve is empty without two different values."""
    finite = [v for v in values if math.isfinite(v)]
    count = min(width, len(finite))
    parts = [finite[i * len(finite) // count : (i + 1) * len(finite) // count] for i in range(count)]
    means = [math.fsum(part) / len(part) for part in parts]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if not low < high:
        return ""
    return "".join(BARS[min(len(BARS) - 1, int((m - low) / (high - low) * len(BARS)))] for m in means)
