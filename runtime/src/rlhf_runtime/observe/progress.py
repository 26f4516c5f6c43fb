"""The progress display of a run: a table on a terminal, plain lines in a file, a summary at the end. :func:`phase`
shows what a command does while it has no such display."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from statistics import median
from typing import Literal, TextIO

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rlhf.samples import first_samples
from rlhf.types import Group

from rlhf_runtime.checkpoint.json_values import dumps
from rlhf_runtime.observe.live_table import LiveTable
from rlhf_runtime.observe.sample_lines import best_and_worst, printable, sample_lines
from rlhf_runtime.output.metrics import step_seconds

Show = Literal["all", "quiet", "json"]
HEADLINE: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/total", "reward/mean"),
    "with failed": ("reward/mean_with_failed",),
    "kl": ("kl/reference", "policy/kl_reference"),
    "kl_old": ("policy/kl_old",),
    "length": ("length/mean",),
    "truncated": ("length/truncated",),
    "loss": ("policy/loss", "loss"),
    "accuracy": ("policy/accuracy",),
    "margin": ("policy/margin", "policy/reward_margin"),
    "value loss": ("critic/loss",),
    "explained variance": ("value/explained_variance",),
    "grad norm": ("policy/grad_norm",),
    "pass@1": ("eval/pass@1",),
    "eval loss": ("eval/loss",),
}
"""{label: metrics in order of preference}. The first metric that the run has is shown. A label without such a metric is
not shown. ``kl`` is the divergence from the reference, ``kl_old`` from the policy at the start of the update."""
TABLE: Mapping[str, tuple[str, ...]] = {
    **HEADLINE,
    "entropy": ("policy/entropy",),
    "token probability": ("policy/token_prob",),
    "token accuracy": ("policy/token_accuracy",),
    "learning rate": ("policy/lr",),
    "sampled tokens/s": ("throughput/sampled",),
    "trained tokens/s": ("throughput/trained",),
    "MFU": ("throughput/mfu",),
}
"""The same as :data:`HEADLINE`, for the table on a terminal."""
_TELLS_NOTHING_AT_ZERO = frozenset({"kl", "kl_old", "truncated", "loss"})
"""Labels that are shown only after their first value that is not about 0. In some runs they are always about 0:
``kl_old`` if an update is one optimizer step, the loss if it is a sum of advantages with mean 0."""
_ABOUT_ZERO = 1e-6
_ASIDE = {"evaluate": "evaluations", "save": "checkpoints", "export": "exports"}
"""{phase that is not part of every step: word in the summary}."""
NOTES_KEPT = 100
"""Largest number of notes that are kept: half of them are the first notes, half the latest. A long run may repeat a
note at every step."""
PROMPT = 60
"""Number of characters at a prompt's end that the table shows before the completion."""

PHASES: Mapping[str, str] = {
    "data": "tokenising rows",
    "generate": "generating",
    "learn": "learning",
    "annotate": "computing log-probs and values",
    "sync": "sending weights",
    "evaluate": "evaluating",
    "save": "saving a checkpoint",
    "export": "exporting the model",
}
"""{phase of a step: text that is shown}."""


class Progress:
    """The display of one run, on the driver. Workers print nothing.

    Args:
        total: steps of the whole run.
        show: output in addition to notes: ``all``; ``json``: each step's line of ``metrics.jsonl``; ``quiet``: nothing.
            With the last two, notes go to standard error.
        stream: where the display is written; None: standard output.
        interval: minimum seconds between plain lines; the first and the last line are always shown.

    Plain lines are ``step=12/100 reward=0.531 kl=0.0012 loss=0.12 left=0:04:12``: ``key=value``, one line per step.
    """

    def __init__(
        self,
        total: int,
        *,
        show: Show = "all",
        stream: TextIO | None = None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total = total
        self.first = self.steps_done = 0
        """Steps that were done before a resume, and by now (:meth:`begin`)."""
        self._quiet, self._interval, self._clock = show != "all", interval, clock
        self._lines = (stream or sys.stdout) if show == "json" else None
        """The stream for JSON lines."""
        self._console = Console(file=sys.stderr if self._quiet else stream or sys.stdout, highlight=False)
        self._started = self._last_step = clock()
        self._shown_at: float | None = None
        self._pending = ""
        self._durations: deque[float] = deque(maxlen=50)
        self._first_values: dict[str, float] = {}
        self._last_values: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        """Number of values of each label."""
        self._step_seconds: list[float] = []
        self._spent: dict[str, float] = dict.fromkeys(_ASIDE, 0.0)
        """Seconds of each phase of :data:`_ASIDE`."""
        self._closed = False
        self.notes: list[str] = []
        """The notes so far, at most :data:`NOTES_KEPT`."""
        self._table: LiveTable | None = None
        if not self._quiet and self._console.is_terminal:
            self._table = LiveTable(self._console, total, clock)

    def begin(self, first: int) -> None:
        """Start the clock and show the table. ``first`` steps were done before. Called after the models are loaded, so
        that loading does not count as time of a step and a run that fails earlier shows no table."""
        self.first = self.steps_done = first
        self._started = self._last_step = self._clock()
        if self._table is not None:
            self._table.steps_done, self._table.left = first, self._left()
            self._table.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show what a step is doing. The table shows the phase with its time. A file gets a line in the first step, and
        for evaluations, checkpoints and exports. A phase inside another one replaces it until it ends."""
        text = PHASES.get(name, name)
        if self._table is not None and self._table.is_active:
            previous, self._table.phase = self._table.phase, (text, self._clock(), {})
            try:
                yield
            finally:
                self._table.phase = previous
            return
        if not self._quiet and (self.steps_done == self.first or name in _ASIDE):
            print(text, file=sys.stderr)  # noqa: T201
        yield

    def count(self, label: str, number: int, total: int) -> None:
        """Show the progress of the phase beside its time, on a terminal: ``micro-batches 3/8``. Called often, and from
        any thread. Counts nested in an earlier ``label`` restart, such as micro-batches in each optimizer step."""
        if self._table is None or (phase := self._table.phase) is None:
            return
        text, start, counts = phase
        outer = dict(takewhile(lambda count: count[0] != label, counts.items()))
        self._table.phase = (text, start, {**outer, label: (number, total)})

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called when ``step`` steps are done. ``metrics`` is the line in ``metrics.jsonl``."""
        time_s = self._clock()
        if step > self.steps_done:
            self._durations.append((time_s - self._last_step) / (step - self.steps_done))
            self._step_seconds.append(step_seconds(metrics, time_s - self._last_step))
        self._last_step, self.steps_done = time_s, max(step, self.steps_done)
        if self._lines is not None:
            self._lines.write(dumps({"step": step, **metrics}, nonfinite="mark") + "\n")
            self._lines.flush()
        values = self._values(metrics, HEADLINE)
        self._last_values |= values
        self._counts.update(values.keys())
        self._first_values = {**values, **self._first_values}
        if self._table is not None:
            self._table.left = self._left()
            self._table.step(self.steps_done, self._values(metrics, TABLE), metrics)
        elif not self._quiet:
            parts = [f"step={step}/{self.total}"]
            parts += [f"{label.replace(' ', '_')}={_number(value)}" for label, value in values.items()]
            self._pending = " ".join([*parts, self._left().replace("left ", "left=")])
            # A line that comes too soon is kept: the next one replaces it, or close() shows it.
            if self._shown_at is None or step >= self.total or time_s - self._shown_at >= self._interval:
                self._flush(time_s)

    def spend(self, phase: str, seconds: float) -> None:
        """Record the time of a phase. The summary names evaluations, checkpoints and exports."""
        if phase in self._spent:
            self._spent[phase] += seconds

    def last_sample(self, step: int, groups: Sequence[Group]) -> None:
        """Show a sample that ``step`` is trained on in the table."""
        if self._table is not None:
            for sample in first_samples(groups[-1:], 1):
                reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
                prompt = " ".join(sample.prompt.split())
                if len(prompt) > PROMPT:  # its end, from the start of a word
                    prompt = f"... {prompt[-PROMPT:].partition(' ')[2] or prompt[-PROMPT:]}"
                self._table.sample = f"step {step}, {reward}: {prompt} -> {sample.completion}"

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """Show the best and the worst sample that ``step`` is trained on."""
        if self._quiet:
            return
        for title, sample in best_and_worst(groups):
            self._line(f"step {step}, {sample_lines(title, sample)}")

    def note(self, text: str) -> None:
        """Show a message to the user, in every mode."""
        if len(self.notes) == NOTES_KEPT:
            del self.notes[NOTES_KEPT // 2]
        self.notes.append(text)
        self._line(f"note: {text}")
        if self._table is not None:
            self._table.note(text)

    def urge(self, text: str) -> bool:
        """Show a line from a signal handler. Returns whether there is a table to show it."""
        if self._table is None or not self._table.is_active:
            return False
        self._table.urge(text)
        return True

    def close(self) -> None:
        """End the table and show the summary. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._table is not None:
            self._table.stop()
        if self._quiet:
            return
        if self._pending:
            self._flush(self._clock())
        self._line(self._summary())

    def _flush(self, time_s: float) -> None:
        self._line(self._pending)
        self._shown_at, self._pending = time_s, ""

    def _line(self, text: str) -> None:
        # no markup: brackets are text. In a file lines stay whole; a terminal would break them inside of words
        with hidden():
            self._console.print(printable(text), soft_wrap=not self._console.is_terminal, markup=False)

    def _values(self, metrics: Mapping[str, float], headline: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
        values = {}
        for label, name in labelled_metrics(metrics, headline).items():
            value = float(metrics[name])
            constant = label in _TELLS_NOTHING_AT_ZERO and label not in self._last_values
            if not (constant and abs(value) < _ABOUT_ZERO):
                values[label] = value
        return values

    def _left(self) -> str:
        if not self._durations or self.steps_done >= self.total:
            return "left 0:00:00" if self.steps_done >= self.total else "left ?"
        seconds = sum(self._durations) / len(self._durations) * (self.total - self.steps_done)
        return f"left {timedelta(seconds=round(seconds))}"

    def _summary(self) -> str:
        elapsed = self._clock() - self._started
        steps = self.steps_done - self.first
        text = f"{self.steps_done} of {self.total} steps"
        if self.first:
            text += f", {steps} of them since the resume"
        text += f", in {timedelta(seconds=round(elapsed))}"
        parts = [f"{median(self._step_seconds):.3g} s a step"] if steps else []
        for phase, seconds in self._spent.items():
            if seconds >= 1:
                parts.append(f"{_ASIDE[phase]} {timedelta(seconds=round(seconds))}")
        if parts:
            text += f" ({', '.join(parts)})"
        for label, last in self._last_values.items():
            first = f"{_number(self._first_values[label])} -> " if self._counts[label] > 1 else ""
            text += f"; {label} {first}{_number(last)}"
        return text


def shown_metrics(names: Collection[str], labels: Iterable[str] = HEADLINE) -> list[str]:
    """Those of ``names`` that the progress display shows, in its order.

    Args:
        labels: labels of the display.
    """
    return list(labelled_metrics(names, {label: HEADLINE[label] for label in labels}).values())


def labelled_metrics(names: Collection[str], headline: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """{label: the metric that it shows} of those of ``names`` that ``headline`` has. An algorithm of several members
    reports a reward for each of them, with the label ``MEMBER reward``."""
    metrics: dict[str, str] = {}
    for label, choices in headline.items():
        name = next((name for name in choices if name in names), None)
        if name is not None:
            metrics[label] = name
            continue
        for name in names if label == "reward" else ():
            member, _, rest = name.partition("/")
            if rest in choices and member != "reward":
                metrics[f"{member} reward"] = name
    return metrics


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


_muted = False
"""Whether phases are not shown."""
_open: list[Bar] = []
"""The displays of the current phase; at most one."""


@contextmanager
def phase(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show ``text`` while the code inside runs. A phase inside another one replaces it until it ends.

    On a terminal it is a line with its time, which is removed at the end of the phase. Elsewhere it is one plain line
    at the start. Yields ``count(number, total)``, which shows these numbers on a terminal.
    """
    console = Console(file=sys.stderr, highlight=False)
    if _muted:
        yield lambda number, total: None
        return
    if not console.is_terminal:
        console.print(text, soft_wrap=True, markup=False)
        yield lambda number, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    display = Bar(*columns, console=console, transient=True)
    task = display.add_task(text)
    with hidden():
        _open.append(display)
        display.start()
        try:
            yield lambda number, total: display.update(task, description=f"{text}: {number} of {total}")
        finally:
            display.stop()
            _open.remove(display)


@contextmanager
def muted(mute: bool = True) -> Iterator[None]:
    """Show no phase while the code inside runs."""
    global _muted
    previous, _muted = _muted, mute
    try:
        yield
    finally:
        _muted = previous


@contextmanager
def hidden() -> Iterator[None]:
    """Remove the line of the phase while the code inside writes to the terminal."""
    display = _open[-1] if _open and _open[-1].live.is_started else None
    if display is not None:
        display.stop()
    try:
        yield
    finally:
        if display is not None:
            display.start()
