"""Reads the facts about a run from its directory. Nothing is written, so this is safe during a run."""

from __future__ import annotations

import datetime
import os
import tomllib
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, RlhfError, did_you_mean

from rlhf_runtime.checkpoint.json_values import loads, read_json
from rlhf_runtime.loop.best_value import BestTracker
from rlhf_runtime.output.folder_lock import FolderLock

DEPTH = 3
"""Number of levels of folders below the named folder that are searched for runs."""
STATES = ("running", "finished", "stopped", "failed")
STARTS = 6
"""Largest number of starts of a run whose times are all shown."""


@dataclass(frozen=True, slots=True)
class BestEvaluation:
    """The best evaluation of a run."""

    metric: str
    value: float
    step: int


class FileLines:
    """The complete lines of a file, without their ends. Only their places are kept: each line is read when it is asked
    for. A last line that is still being written is left out."""

    def __init__(self, path: Path | str) -> None:
        self._file = os.open(path, os.O_RDONLY)  # kept open: a resume replaces the file
        weakref.finalize(self, os.close, self._file)
        self._starts = array("q", [0])
        with open(self._file, "rb", closefd=False) as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._starts.append(self._starts[-1] + len(line))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, number: int) -> bytes:
        start = self._starts[number]
        return os.pread(self._file, self._starts[number + 1] - start - 1, start)


@dataclass(frozen=True)
class RunRecord:
    """A run directory, read once. :attr:`problems` lists missing and damaged parts. Everything else can be used."""

    path: Path
    config: Mapping[str, Any]
    """The tables of ``config.toml``; empty if there is none."""
    starts: Sequence[Mapping[str, Any]]
    """The entries of ``manifest.json``, one for each start of the run; empty if there is none."""
    is_held: bool
    """Whether a process holds the directory."""
    problems: list[str] = field(default_factory=list)
    """Sentences, each about one file."""

    @classmethod
    def read(cls, path: Path) -> RunRecord:
        """The record of the run in ``path``. Raises ConfigError if there is none."""
        if not is_run(path):
            raise ConfigError(_no_run(path))
        problems: list[str] = []
        config = _tolerant(read_config, path / "config.toml", {}, problems)
        starts = _tolerant(_read_starts, path / "manifest.json", [], problems)
        return cls(path, config, starts, FolderLock.is_held(path), problems)

    @property
    def start(self) -> Mapping[str, Any]:
        """The last start."""
        return self.starts[-1] if self.starts else {}

    @property
    def end(self) -> Mapping[str, str]:
        """How the last start ended: ``time``, ``status``, ``why``; empty if that is not recorded."""
        end = self.start.get("ended", {})
        return end if isinstance(end, dict) else {}

    def option(self, path: str, default: Any = None) -> Any:
        """The value of an option by its dotted path, e.g. ``reward.0.weight``."""
        value: Any = self.config
        for part in path.split("."):
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (KeyError, IndexError, ValueError, TypeError):
                return default
        return value

    @property
    def options(self) -> dict[str, str]:
        """{dotted path: value as text} of every option. A list of plain values is one value."""
        values: dict[str, str] = {}

        def walk(value: Any, path: str) -> None:
            if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
                value = dict(enumerate(value))
            if not isinstance(value, Mapping):
                values[path] = value_text(value)
                return
            for name, item in value.items():
                walk(item, f"{path}.{name}" if path else str(name))

        walk(self.config, "")
        return values

    @property
    def options_changed(self) -> list[str] | None:
        """Dotted paths of the options that differed from their defaults at the first start; None if that is not
        recorded."""
        first = self.starts[0].get("options") if self.starts else None
        return [str(path) for path in first] if isinstance(first, list) else None

    @property
    def plugins(self) -> list[Mapping[str, Any]]:
        """The plugins of the last start: ``kind``, ``name``, ``distribution``, ``version``; for files ``ref``."""
        plugins = self.start.get("plugins", [])
        return [plugin for plugin in plugins if isinstance(plugin, dict)] if isinstance(plugins, list) else []

    @property
    def algorithm(self) -> str:
        return str(self.option("algorithm.use", ""))

    @property
    def model(self) -> str:
        return str(self.option("policy.model", ""))

    @property
    def data(self) -> str:
        """The paths of the rows that it trains on."""
        sources = self.option("data.train")
        sources = sources if isinstance(sources, list) else []
        return ", ".join(str(source.get("path", "")) for source in sources if isinstance(source, Mapping))

    @property
    def total_steps(self) -> int | None:
        """None if the run had a number of epochs, and comes from a release that did not record its steps."""
        steps = self.start.get("total_steps") or self.option("run.steps")
        return steps if isinstance(steps, int) else None

    @cached_property
    def lines(self) -> FileLines:
        """The lines of ``metrics.jsonl``."""
        try:
            return FileLines(self.path / "metrics.jsonl")
        except OSError:
            return FileLines(os.devnull)

    @cached_property
    def last(self) -> Mapping[str, Any]:
        """The last line of ``metrics.jsonl``; empty if no step is finished."""
        return self.line(len(self.lines) - 1) if self.lines else {}

    @property
    def steps_done(self) -> int:
        """Finished steps."""
        step = self.last.get("step", 0)
        return step if isinstance(step, int) else 0

    @property
    def best(self) -> BestEvaluation | None:
        """The best evaluation by ``eval.metric`` and ``eval.mode``; None if there is none yet."""
        tracker = self._evaluations
        if tracker.value is None or tracker.step is None or tracker.metric is None:
            return None
        return BestEvaluation(tracker.metric, tracker.value, tracker.step)

    @property
    def is_complete(self) -> bool:
        """Whether a resume has nothing to do: all steps are done, or ``eval.patience`` ended the run."""
        state, _ = self.state
        return state == "finished" or (state == "stopped" and self._evaluations.exhausted)

    @cached_property
    def _evaluations(self) -> BestTracker:
        """The evaluations so far, followed as the run does."""
        patience = self.option("eval.patience")
        patience = patience if type(patience) is int and patience > 0 else None
        tracker = BestTracker(self.option("eval.metric"), self.option("eval.mode", "auto"), patience)
        for number in range(len(self.lines)):
            line = self.line(number) if b'"eval/' in self.lines[number] else {}
            try:
                if line.get("step", 0) > 0:  # step 0 is the model before training: no checkpoint contains it
                    tracker.update(line["step"], line)
            except (ConfigError, TypeError, ValueError):  # this evaluation does not have the metric
                continue
        return tracker

    @property
    def state(self) -> tuple[str, str]:
        """(one of :data:`STATES`, the reason, which is empty if nothing is known)."""
        # A resume holds the folder before it records its start, so the last start may still be recorded as ended.
        if self.is_held:
            return "running", _text(self.path / ".lock")
        status = str(self.end.get("status", ""))
        if status in STATES:
            return status, str(self.end.get("why", ""))
        return "failed", "it did not record its end: it was killed, or the machine went down"

    @property
    def time(self) -> datetime.datetime:
        """When the run ended. If that is not recorded, when its files last changed."""
        end = None if self.is_held else _time(self.end.get("time"))
        files = [self.path / name for name in ("metrics.jsonl", "manifest.json", ".lock")]
        newest = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
        return end or datetime.datetime.fromtimestamp(newest).astimezone()

    @property
    def started(self) -> list[datetime.datetime]:
        """The time of each start, if recorded."""
        return [time for start in self.starts if (time := _time(start.get("time"))) is not None]

    def line(self, number: int) -> Mapping[str, Any]:
        """A line of ``metrics.jsonl``, counted from 0. Empty if it cannot be read: see :attr:`problems`."""
        location = f"{self.path / 'metrics.jsonl'}:{number + 1}"
        try:
            line = loads(self.lines[number].decode("utf-8", errors="replace"), location)
        except RlhfError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return {}
        return line if isinstance(line, dict) else {}


def is_run(path: Path) -> bool:
    """Whether ``path`` holds a run, including a run that is just starting."""
    files = {name: (path / name).is_file() for name in ("config.toml", "manifest.json", "metrics.jsonl")}
    return files["metrics.jsonl"] or (files["config.toml"] and files["manifest.json"]) or FolderLock.is_held(path)


def find_runs(folder: Path) -> Iterator[Path]:
    """``folder`` alone if it is a run, else the runs at most :data:`DEPTH` folders below it. Links are not followed."""
    if is_run(folder):
        yield folder
        return
    depth = len(folder.parts)
    for place, folders, _ in os.walk(folder):
        candidate = Path(place)
        if candidate != folder and is_run(candidate):
            folders.clear()
            yield candidate
        if len(candidate.parts) - depth >= DEPTH:
            folders.clear()
        # os.walk goes on into the folders that are left in this list.
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def few(times: Sequence[str]) -> list[str]:
    """The times of starts; of more than :data:`STARTS`, the first and the last, with the number of the others."""
    return [*times] if len(times) <= STARTS else [times[0], f"{len(times) - 2} more", times[-1]]


def value_text(value: Any) -> str:
    """A value of the run file; simple values as in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {value_text(v)}" for name, v in value.items()) + "}"
    return str(value)


def _no_run(path: Path) -> str:
    if not path.exists():
        runs = sorted(str(p) for p in find_runs(path.parent)) if path.parent.is_dir() else []
        runs += [str(p) for p in find_runs(Path("runs"))] if Path("runs").is_dir() else []
        hint = did_you_mean(str(path), runs) or did_you_mean(f"runs/{path}", runs)
        return f"there is no folder {path}.{hint} `rlhf runs FOLDER` lists the runs below a folder."
    if not path.is_dir():
        return f"{path} is a file. Name the folder of a run: the one that holds its metrics.jsonl."
    runs = [str(p) for p in find_runs(path)]
    hint = f" Runs below it: {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}." if runs else ""
    return f"{path} holds no run: it has no metrics.jsonl, and no config.toml with a manifest.json.{hint}"


def _tolerant(reader: Callable[[Path], Any], path: Path, absent: Any, problems: list[str]) -> Any:
    """The result of ``reader``. After an error, ``absent``, and a sentence is added to ``problems``."""
    if not path.exists():
        problems.append(f"{path.name} is missing: it is written when the models are loaded.")
        return absent
    try:
        return reader(path)
    except RlhfError as error:
        problems.append(str(error))
        return absent


def read_config(path: Path) -> Mapping[str, Any]:
    """The tables of a ``config.toml``. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise ConfigError(f"{path} cannot be read: {cause}.") from cause


def _read_starts(path: Path) -> Sequence[Mapping[str, Any]]:
    manifest = read_json(path)
    starts = manifest.get("starts") if isinstance(manifest, dict) else None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ConfigError(f"{path} lists no starts of a run: it was edited, or another release wrote it.")
    return starts


def _time(text: Any) -> datetime.datetime | None:
    """The time in the local zone; None if ``text`` is not a time."""
    try:
        return datetime.datetime.fromisoformat(text).astimezone()
    except (ValueError, TypeError):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
