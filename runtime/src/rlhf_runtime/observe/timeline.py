"""``timeline.json``: the activities of the driver, the samples and the rewards over time, for ui.perfetto.dev and other
viewers. Without a timeline, nothing is recorded.

The file is in the Trace Event Format: a JSON array with one event per line. The format allows an array without its end,
so the file of a killed run can be opened. A resume appends to the file. A slice is written when it ends, as one event
with its duration, which all viewers read alike (speedscope does not pair events of a begin and an end with other
arguments).

Slices on one track are nested, and no two begin in the same microsecond. Concurrent slices are on different tracks. A
slice that is not inside another one gets the first free track of its kind.
"""

from __future__ import annotations

import heapq
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any, Literal, get_args

Kind = Literal["driver", "samples", "rewards", "events"]


class Slice:
    """A block of code that is timed. This class is for runs without a timeline: it records nothing."""

    def child(self, name: str, **arguments: Any) -> AbstractContextManager[Slice]:
        """A block inside of this one."""
        return _NO_SLICE

    def add(self, **arguments: Any) -> None:
        """Add arguments, which the viewers show with the slice."""


_NO_SLICE = nullcontext(Slice())


class Timeline:
    """The interface by which a run records its activities. This class is for runs without a timeline: it records
    nothing."""

    def step(self, step: int | None) -> None:
        """``step`` begins; None: the last step has ended."""

    def phase(self, name: str) -> AbstractContextManager[Slice]:
        """A phase of the step, on the main thread."""
        return _NO_SLICE

    def slice(self, kind: Kind, name: str, **arguments: Any) -> AbstractContextManager[Slice]:
        """A block that may run concurrently with others."""
        return _NO_SLICE

    def instant(self, name: str, **arguments: Any) -> None:
        """An event without duration."""

    def close(self) -> None:
        """Complete the file."""


NO_TIMELINE = Timeline()


KINDS: tuple[Kind, ...] = get_args(Kind)
"""The viewers list the tracks of one kind together, as one process."""
INTERVAL = 1.0
"""Seconds between two writes to the file."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class _FileSlice(Slice):
    def __init__(self, file: TimelineFile, kind: Kind, track: int) -> None:
        self.file, self.kind, self.track = file, kind, track
        self.added: dict[str, Any] = {}
        self._has_child = False

    @contextmanager
    def child(self, name: str, **arguments: Any) -> Iterator[Slice]:
        if self._has_child:  # two at the same time
            with self.file.slice(self.kind, name, **arguments) as piece:
                yield piece
            return
        self._has_child = True
        try:
            with self.file.on_track(self.kind, self.track, name, arguments) as piece:
                yield piece
        finally:
            self._has_child = False

    def add(self, **arguments: Any) -> None:
        self.added |= arguments


class TimelineFile(Timeline):
    """Writes the file. Any thread may call it.

    Args:
        start: number of this start of the run, from 1.
        steps: number of steps that are written. After them the file is complete.
        note: called with the reason if the file cannot be written. The run continues.
    """

    def __init__(self, path: Path, start: int, steps: int, note: Callable[[str], None]) -> None:
        self._path, self._start, self._steps, self._note = path, start, steps, note
        self._offset = time.time_ns() - time.perf_counter_ns()  # the wall clock may be set back during the run
        self._step: int | None = None
        self._begun = 0
        self._free: defaultdict[Kind, list[int]] = defaultdict(list)
        self._tracks: Counter[Kind] = Counter()
        self._open: defaultdict[tuple[Kind, int], list[tuple[int, str, dict[str, Any]]]] = defaultdict(list)
        """Open slices by track: (begin, name, arguments)."""
        self._latest: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        """Microseconds of the latest begin or end of a slice, by track."""
        self._lines: list[str] | None = []
        """Events that are not in the file yet; None: the file is complete."""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._file = _open(path)
        for kind in KINDS:
            name = kind if start == 1 else f"{kind}, start {start}"
            self._event("M", kind, 0, name="process_name", args={"name": name})
            self._event("M", kind, 0, name="process_sort_index", args={"sort_index": self._process(kind)})
        for kind in ("driver", "events"):
            self._event("M", kind, 0, name="thread_name", args={"name": kind})
        # A write releases Python's lock. On the event loop, every sample would then wait for the main thread.
        self._writer = threading.Thread(target=self._write_often, name="rlhf-timeline", daemon=True)
        self._writer.start()

    # ------------------------------------------------------------------------------ what a run calls

    def step(self, step: int | None) -> None:
        if self._step is not None:
            self._end("driver", 0, {})
        if step is not None and self._begun == self._steps:
            self.close()
        self._step = step
        if step is not None:
            self._begun += 1
            self._begin("driver", 0, f"step {step + 1}", {})

    def phase(self, name: str) -> AbstractContextManager[Slice]:
        return self.on_track("driver", 0, name, {})

    @contextmanager
    def slice(self, kind: Kind, name: str, **arguments: Any) -> Iterator[Slice]:
        with self._lock:
            free = self._free[kind]
            track = heapq.heappop(free) if free else self._tracks[kind]
            new = track == self._tracks[kind]
            self._tracks[kind] += new
        if new:
            self._event("M", kind, track, name="thread_name", args={"name": f"{kind} {track + 1}"})
        try:
            with self.on_track(kind, track, name, arguments) as slice:
                yield slice
        finally:
            with self._lock:
                heapq.heappush(free, track)

    def instant(self, name: str, **arguments: Any) -> None:
        self._event("i", "events", 0, name=name, s="t", args=self._arguments(arguments))

    def close(self) -> None:
        with self._lock:
            if self._lines is None:
                return
            for (kind, track), slices in self._open.items():
                while slices:
                    self._lines.append(self._end_event(kind, track, {}))
            self._lines.append(self._line("i", "events", 0, {"name": "end of the timeline", "s": "t"}))
            lines, self._lines = self._lines, None
        self._closing.set()
        self._writer.join()
        self._write("".join(lines).removesuffix(",\n") + "\n]")
        with suppress(OSError):  # reported before
            self._file.close()

    # --------------------------------------------------------------------------- slices and events

    @contextmanager
    def on_track(self, kind: Kind, track: int, name: str, arguments: dict[str, Any]) -> Iterator[Slice]:
        """A slice on a free track, or inside the latest slice of the track."""
        slice = _FileSlice(self, kind, track)
        self._begin(kind, track, name, self._arguments(arguments))
        try:
            yield slice
        finally:
            self._end(kind, track, slice.added)

    def _arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments if self._step is None else {"step": self._step + 1, **arguments}

    def _begin(self, kind: Kind, track: int, name: str, arguments: dict[str, Any]) -> None:
        with self._lock:
            if self._lines is not None:
                begin = self._latest[kind, track] = max(self._time_us(), self._latest[kind, track] + 1)
                self._open[kind, track].append((begin, name, arguments))

    def _end(self, kind: Kind, track: int, added: dict[str, Any]) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.append(self._end_event(kind, track, added))

    def _end_event(self, kind: Kind, track: int, added: dict[str, Any]) -> str:
        """The event of the innermost slice of the track, which ends now."""
        begin, name, arguments = self._open[kind, track].pop()
        # The latest begin may be after the clock, because _begin moves it behind the slice before.
        end = self._latest[kind, track] = max(self._time_us(), self._latest[kind, track])
        values = {"args": arguments | added} if arguments or added else {}
        return self._line("X", kind, track, {"name": name, "dur": end - begin, **values}, begin)

    def _event(self, phase: str, kind: Kind, track: int, **fields: Any) -> None:
        with self._lock:
            if self._lines is not None:
                self._lines.append(self._line(phase, kind, track, fields))

    def _time_us(self) -> int:
        return (time.perf_counter_ns() + self._offset) // 1000

    def _line(self, phase: str, kind: Kind, track: int, fields: dict[str, Any], time: int | None = None) -> str:
        microseconds = self._time_us() if time is None else time
        process = self._process(kind)
        thread = process * 1_000_000 + track  # different from every other track and process: viewers require both
        event = {"ph": phase, "pid": process, "tid": thread, "ts": microseconds, "cat": kind, **fields}
        return f"{_ENCODER.encode(event)},\n"

    def _process(self, kind: Kind) -> int:
        return 1 + (self._start - 1) * len(KINDS) + KINDS.index(kind)

    def _write_often(self) -> None:
        while not self._closing.wait(INTERVAL):
            with self._lock:
                lines = self._lines
                if lines is None:
                    return
                self._lines = []
            self._write("".join(lines))

    def _write(self, text: str) -> None:
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            self._note(f"the timeline ends here: {self._path} cannot be written: {error}")
            with self._lock:
                self._lines = None


def _open(path: Path) -> IO[bytes]:
    """Open the file to append events. The end of the array and an incomplete last line are removed."""
    file = path.open("r+b" if path.exists() else "w+b")
    size = file.seek(0, 2)
    # Only the tail is searched: an event is much shorter than 64 KiB.
    file.seek(max(0, size - 2**16))
    tail = file.read(2**16)
    if tail.endswith(b"\n]"):
        file.seek(size - 2)
        file.write(b",\n")
    elif b",\n" in tail:
        file.seek(size - len(tail) + tail.rfind(b",\n") + 2)
        file.truncate()
    else:
        file.seek(0)
        file.truncate()
        file.write(b"[\n")
    return file
