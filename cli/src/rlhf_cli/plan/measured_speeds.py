"""Reads the durations of a run's parts from its folder. ``metrics.jsonl`` has the phases of the steps,
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

ADVICE = "Record a suitable run with `rlhf train RUN.TOML --run.steps 4 --run.timeline 4`"


@dataclass(frozen=True)
class Measured:
    speeds: Speeds
    steps: int
    """Number of measured steps."""
    answers: tuple[float, float]
    """Smallest and largest number of concurrent answers on an engine, as means over the time of a turn."""


@dataclass
class _Slice:
    begin: float
    end: float
    arguments: Mapping[str, Any]


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps with an update, without the first step, which is slower.

    Raises ConfigError if no such line has times.
    """
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if f"{TIME}learn" in line and line["step"] > 1]
    if not lines:
        raise ConfigError(
            f"--speeds {folder}: metrics.jsonl has no times of a second step with an update, and the first is not "
            f"counted. {ADVICE}."
        )
    return lines


def mean_time(lines: Sequence[Mapping[str, float]], phase: str) -> float:
    return fmean(line.get(f"{TIME}{phase}", 0.0) for line in lines)


def other_time(lines: Sequence[Mapping[str, float]]) -> float:
    """Seconds of a step outside its phases. ``annotate`` is a part of ``learn``; ``save`` and ``export`` come after the
    step."""
    phases = ("generate", "learn", "sync", "data", "evaluate")
    return max(0.0, mean_time(lines, "step") - sum(mean_time(lines, phase) for phase in phases))


def measured_speeds(folder: Path, waves: bool, batch: int, engines: int) -> Measured:
    """The measured speeds of the run in ``folder``.

    Args:
        waves: whether the run sampled in waves.
        batch: number of samples of a step.
        engines: number of its engines.

    Raises ConfigError if the run has no timeline, or one without a sample of a second step.
    """
    lines = step_lines(folder)
    slices = _slices(folder / "timeline.json")
    turns = [s for s in slices["turn"] if "tokens" in s.arguments]
    starts = _wave_starts(turns, slices["sample"]) if waves else {id(t): t.begin for t in turns}
    turns_of_sample: defaultdict[tuple[int, int], list[_Slice]] = defaultdict(list)
    for turn in turns:
        turns_of_sample[turn.arguments["group"], turn.arguments["sample"]].append(turn)
    samples: defaultdict[int, list[SampleTimes]] = defaultdict(list)
    counted_turns: list[_Slice] = []
    for sample in sorted(slices["sample"], key=lambda s: s.arguments["sample"]):
        arguments = sample.arguments
        if arguments["purpose"] != TRAINING or "status" not in arguments or arguments.get("step", 0) < 2:
            continue
        sample_turns = [
            t
            for t in turns_of_sample[arguments["group"], arguments["sample"]]
            if sample.begin <= t.begin and t.end <= sample.end
        ]
        samples[arguments["group"]].append(_sample_times(sample, sample_turns))
        counted_turns += sample_turns
    rewards = {s.arguments["group"]: s.end - s.begin for s in slices["rewards"] if s.arguments["purpose"] == TRAINING}
    if not counted_turns:
        raise ConfigError(f"--speeds {folder}: timeline.json has no sample of a second step. {ADVICE}.")
    groups = [GroupTimes(own_samples, rewards.get(number, 0.0)) for number, own_samples in samples.items()]
    prompts = sum(line["stream/prompts"] for line in lines)
    lost = sum(line["stream/filtered"] + line["stream/failed_groups"] for line in lines)
    token, per_sample, request, answers = _sampling_speed(turns, counted_turns, starts, slices["sync"], engines)
    sync = mean_time(lines, "sync")
    pause = mean_time(lines, "sync_pause") or sync
    speeds = Speeds(groups, token, 0.0, per_sample, request, sync, pause, other_time(lines), lost / prompts)
    speeds = replace(speeds, learn_a_token=mean_time(lines, "learn") / (batch * speeds.tokens))
    return Measured(speeds, len(lines), answers)


def _slices(path: Path) -> defaultdict[str, list[_Slice]]:
    """{name: slices in the order of their ends}; seconds. The file of a killed run lacks the end of its array."""
    try:
        text = path.read_text(encoding="utf-8").removesuffix("\n]").removesuffix(",\n").removeprefix("[\n")
        events = [json.loads(line.removesuffix(",")) for line in text.splitlines()]
    except FileNotFoundError:
        raise ConfigError(f"--speeds {path.parent}: the run has no timeline.json. {ADVICE}.") from None
    except ValueError as error:
        raise ConfigError(f"--speeds {path.parent}: timeline.json is damaged: {error}. {ADVICE}.") from None
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
    length = max(turn.arguments["context"] + turn.arguments["tokens"] for turn in turns)
    return SampleTimes(times, turns[0].begin - sample.begin, max(0, length - sum(t.tokens for t in times)))


def _wave_starts(turns: Sequence[_Slice], samples: Sequence[_Slice]) -> dict[int, float]:
    """{id of a turn: start time of its wave}. A wave starts when all unfinished samples wait for it: at its last
    request, or when the last sample ends that makes no further request. No turn of the next wave begins before the
    first turn of this wave has ended."""
    sample_ends = sorted(sample.end for sample in samples)
    starts: dict[int, float] = {}
    wave: list[_Slice] = []
    first_end = math.inf
    for turn in [*sorted(turns, key=lambda turn: turn.begin), None]:
        if wave and (turn is None or turn.begin >= first_end):
            count = bisect_left(sample_ends, first_end)
            start = max(wave[-1].begin, sample_ends[count - 1] if count else 0.0)
            starts |= dict.fromkeys(map(id, wave), start)
            wave, first_end = [], math.inf
        if turn is not None:
            wave.append(turn)
            first_end = min(first_end, turn.end)
    return starts


def _sampling_speed(
    turns: Sequence[_Slice],
    counted_turns: Sequence[_Slice],
    starts: Mapping[int, float],
    syncs: Sequence[_Slice],
    engines: int,
) -> tuple[float, float, float, tuple[float, float]]:
    """``Speeds.token``, ``Speeds.per_answer`` and ``Speeds.request`` by least squares on the seconds of turns, none
    below 0, and the smallest and largest number of concurrent answers on an engine. If several terms explain the times
    equally well, the first is used: the cost of n is unknown if n is always the same."""
    moments = np.sort([*starts.values(), *(turn.end for turn in turns)])
    begins, ends = np.sort(list(starts.values())), np.sort([turn.end for turn in turns])
    under_way = np.searchsorted(begins, moments, "right") - np.searchsorted(ends, moments, "right")
    concurrency, durations = np.maximum(under_way[:-1] / engines, 1.0), np.diff(moments)
    begin = np.array([starts[id(turn)] for turn in counted_turns])
    end = np.array([turn.end for turn in counted_turns])
    seconds = end - begin
    for sync in syncs:  # nothing is sampled during a sync
        seconds -= np.clip(np.minimum(end, sync.end) - np.maximum(begin, sync.begin), 0.0, None)
    tokens = np.array([float(turn.arguments["tokens"]) for turn in counted_turns])

    def integral(values: Any) -> Any:
        """Integral of the values over the time of each turn."""
        integrals = np.concatenate([[0.0], np.cumsum(values * durations)])
        return np.interp(end, moments, integrals) - np.interp(begin, moments, integrals)

    point = best = np.array([1.0, 0.0, 0.0])
    for step in range(8):  # n is the mean over a turn's tokens, and their times depend on the result
        rates = 1 / np.maximum(point[0] + point[1] * concurrency, 1e-12)
        mean = integral(concurrency * rates) / np.maximum(integral(rates), 1e-12)
        terms, smallest = np.stack([tokens, tokens * mean, np.ones_like(tokens)], axis=1), math.inf
        for columns in ([0], [1], [0, 2], [1, 2], [0, 1], [0, 1, 2]):
            values = np.linalg.lstsq(terms[:, columns], seconds, rcond=None)[0]
            error = float(((terms[:, columns] @ values - seconds) ** 2).sum())
            # Later sets have more terms, so they must explain clearly more.
            if (values >= 0).all() and error < 0.95 * smallest:
                best, smallest = np.zeros(3), error
                best[columns] = values
        point = (point + best) / 2 if step else best  # a half step, because whole steps oscillate
    token, per_sample, request = map(float, best)
    return token, per_sample, request, (float(mean.min()), float(mean.max()))
