"""Reads from the folder of a run how long its parts took: ``metrics.jsonl`` has the phases of the steps,
``timeline.json`` every turn of the samples."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rlhf.errors import ConfigError
from rlhf_runtime.output.metrics import TIME, read_metrics
from rlhf_runtime.samples.rollout_settings import TRAINING

from rlhf_cli.plan.speeds import GroupTimes, SampleTimes, Speeds, TurnTimes

AGAIN = "Make one with `rlhf train RUN.TOML --run.steps 4 --run.timeline 4`"


@dataclass(frozen=True)
class Measured:
    speeds: Speeds
    steps: int
    """That were measured."""
    answers: tuple[float, float]
    """Fewest and most answers at once on an engine, as means over the time of a turn."""


@dataclass
class _Slice:
    begin: float
    end: float
    arguments: Mapping[str, Any]


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps with an update, without the first step, which is slower.

    Raises ConfigError if there is none with times.
    """
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if f"{TIME}learn" in line and line["step"] > 1]
    if not lines:
        raise ConfigError(
            f"--speeds {folder}: metrics.jsonl has no times of a second step with an update, and the first is not "
            f"counted. {AGAIN}."
        )
    return lines


def mean_time(lines: Sequence[Mapping[str, float]], phase: str) -> float:
    return fmean(line.get(f"{TIME}{phase}", 0.0) for line in lines)


def other_time(lines: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step between its phases. ``annotate`` is a part of ``learn``; ``save`` and ``export`` are after the
    step."""
    phases = ("generate", "learn", "sync", "data", "evaluate")
    return max(0.0, mean_time(lines, "step") - sum(mean_time(lines, phase) for phase in phases))


def measured_speeds(folder: Path, waves: bool, batch: int, engines: int) -> Measured:
    """What the run in ``folder`` measured.

    Args:
        waves: whether it sampled in waves.
        batch: samples of a step.
        engines: that it had.

    Raises ConfigError if the run has no timeline, or one without a sample of a second step.
    """
    lines = step_lines(folder)
    slices = _slices(folder / "timeline.json")
    turns = [s for s in slices["turn"] if "tokens" in s.arguments]
    starts = _wave_starts(turns, slices["sample"]) if waves else {id(t): t.begin for t in turns}
    own: defaultdict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for turn in turns:
        own[turn.arguments["group"], turn.arguments["sample"]].append(turn)
    samples: defaultdict[int, list[SampleTimes]] = defaultdict(list)
    counted: list[_Slice] = []
    for sample in sorted(slices["sample"], key=lambda s: s.arguments["sample"]):
        about = sample.arguments
        if about["purpose"] != TRAINING or "status" not in about or about.get("step", 0) < 2:
            continue
        inside = [t for t in own[about["group"], about["sample"]] if sample.begin <= t.begin and t.end <= sample.end]
        samples[about["group"]].append(_sample_times(sample, inside))
        counted += inside
    rewards = {s.arguments["group"]: s.end - s.begin for s in slices["rewards"] if s.arguments["purpose"] == TRAINING}
    if not counted:
        raise ConfigError(f"--speeds {folder}: timeline.json has no sample of a second step. {AGAIN}.")
    groups = [GroupTimes(own_samples, rewards.get(number, 0.0)) for number, own_samples in samples.items()]
    prompts = sum(line["stream/prompts"] for line in lines)
    lost = sum(line["stream/filtered"] + line["stream/failed_groups"] for line in lines)
    token, beside, request, answers = _sampling_speed(turns, counted, starts, slices["sync"], engines)
    sync = mean_time(lines, "sync")
    pause = mean_time(lines, "sync_pause") or sync
    speeds = Speeds(groups, token, 0.0, beside, request, sync, pause, other_time(lines), lost / prompts)
    speeds = replace(speeds, learn_a_token=mean_time(lines, "learn") / (batch * speeds.tokens))
    return Measured(speeds, len(lines), answers)


def _slices(path: Path) -> defaultdict[str, list[_Slice]]:
    """{name: slices in the order of their ends}; seconds. The file of a killed run lacks the end of its array."""
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n]").removesuffix(",\n").removeprefix("[\n")
        events = [json.loads(line.removesuffix(",")) for line in text.splitlines()]
    except FileNotFoundError:
        raise ConfigError(f"--speeds {path.parent}: the run has no timeline.json. {AGAIN}.") from None
    except ValueError as error:
        raise ConfigError(f"--speeds {path.parent}: timeline.json is damaged: {error}. {AGAIN}.") from None
    slices: defaultdict[str, list[_Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            slices[event["name"]].append(_Slice(begin, begin + event["dur"] / 1e6, event.get("args", {})))
    return slices


def _sample_times(sample: _Slice, turns: Sequence[_Slice]) -> SampleTimes:
    turns = sorted(turns, key=lambda turn: turn.begin)
    if not turns:
        return SampleTimes((), sample.end - sample.begin)
    nexts = [*(turn.begin for turn in turns[1:]), sample.end]
    times = tuple(TurnTimes(t.arguments["tokens"], after - t.end) for t, after in zip(turns, nexts, strict=True))
    whole = max(turn.arguments["context"] + turn.arguments["tokens"] for turn in turns)
    return SampleTimes(times, turns[0].begin - sample.begin, max(0, whole - sum(t.tokens for t in times)))


def _wave_starts(turns: Sequence[_Slice], samples: Sequence[_Slice]) -> dict[int, float]:
    """{id of a turn: when its wave started}. A wave starts when all samples under way wait for it: at its last request,
    or when the last sample ends that does not ask again. No turn of the next wave begins before one of this wave
    ends."""
    sample_ends = sorted(sample.end for sample in samples)
    starts: dict[int, float] = {}
    wave: list[_Slice] = []
    first_end = math.inf
    for turn in [*sorted(turns, key=lambda turn: turn.begin), None]:
        if wave and (turn is None or turn.begin >= first_end):
            ended = bisect_left(sample_ends, first_end)
            start = max(wave[-1].begin, sample_ends[ended - 1] if ended else 0.0)
            starts |= dict.fromkeys(map(id, wave), start)
            wave, first_end = [], math.inf
        if turn is not None:
            wave.append(turn)
            first_end = min(first_end, turn.end)
    return starts


def _sampling_speed(
    turns: Sequence[_Slice],
    counted: Sequence[_Slice],
    starts: Mapping[int, float],
    syncs: Sequence[_Slice],
    engines: int,
) -> tuple[float, float, float, tuple[float, float]]:
    """``Speeds.token``, ``Speeds.beside`` and ``Speeds.request`` with the smallest squared errors of the seconds of
    turns, none below 0; fewest and most answers at once on an engine. Of terms that explain the times alike, the first
    of these is taken: what n costs is not known where it is always the same."""
    moments = np.sort([*starts.values(), *(turn.end for turn in turns)])
    begins, ends = np.sort(list(starts.values())), np.sort([turn.end for turn in turns])
    under_way = np.searchsorted(begins, moments, "right") - np.searchsorted(ends, moments, "right")
    beside, durations = np.maximum(under_way[:-1] / engines, 1.0), np.diff(moments)
    begin = np.array([starts[id(turn)] for turn in counted])
    end = np.array([turn.end for turn in counted])
    seconds = end - begin
    for sync in syncs:  # nothing is sampled meanwhile
        seconds -= np.clip(np.minimum(end, sync.end) - np.maximum(begin, sync.begin), 0.0, None)
    tokens = np.array([float(turn.arguments["tokens"]) for turn in counted])

    def integral(values: Any) -> Any:
        """Over the time of each turn."""
        whole = np.concatenate([[0.0], np.cumsum(values * durations)])
        return np.interp(end, moments, whole) - np.interp(begin, moments, whole)

    point = best = np.array([1.0, 0.0, 0.0])
    for step in range(8):  # n is the mean over a turn's tokens, and when these were sampled the result says
        rates = 1 / np.maximum(point[0] + point[1] * beside, 1e-12)
        mean = integral(beside * rates) / np.maximum(integral(rates), 1e-12)
        terms, least = np.stack([tokens, tokens * mean, np.ones_like(tokens)], axis=1), math.inf
        for columns in ([0], [1], [0, 2], [1, 2], [0, 1], [0, 1, 2]):
            values = np.linalg.lstsq(terms[:, columns], seconds, rcond=None)[0]
            error = float(((terms[:, columns] @ values - seconds) ** 2).sum())
            if (values >= 0).all() and error < 0.95 * least:
                best, least = np.zeros(3), error
                best[columns] = values
        point = (point + best) / 2 if step else best  # half of the way: a whole one alternates
    token, more, request = map(float, best)
    return token, more, request, (float(mean.min()), float(mean.max()))
