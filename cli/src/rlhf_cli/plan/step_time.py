"""Step times of a run in waves and with a continuous stream, for ``rlhf plan --speeds``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Place
from rlhf_runtime.checks import sampling, sections
from rlhf_runtime.checks.run import RunPlugins
from rlhf_runtime.config.placement import ranks_of
from rlhf_runtime.config.sections import PlacementSection
from rlhf_runtime.report.run_record import RunRecord
from rlhf_runtime.samples.episodes import Episodes
from rlhf_runtime.samples.rollout_settings import training_settings

from rlhf_cli.plan.measured_speeds import Measured, mean_time, measured_speeds, other_time, step_lines
from rlhf_cli.plan.speeds import (
    FLAGS,
    NEEDED,
    Distribution,
    GroupTimes,
    SampleTimes,
    Speeds,
    TurnTimes,
    with_distributions,
)
from rlhf_cli.plan.virtual_run import StepTime, virtual_run

if TYPE_CHECKING:
    from rich.table import Table

PLAIN = {"order": "submission", "oversample": None, "round": 1}
LAYOUTS = [("waves", 0), ("waves", 1), *(("continuous", staleness) for staleness in (0, 1, 2, 4))]
SAMPLING = ("policy.model", "policy.dtype", "generator.use", "placement.generator.devices")
LEARNING = ("policy.model", "policy.dtype", "algorithm.use", "trainer.use", "placement.policy.ranks")
"""Options that determine the speed. The measured run must have the same values."""


@dataclass(frozen=True)
class LayoutTime:
    name: str
    options: Mapping[str, str]
    """Options of the layout, as flags of the run file."""
    time: StepTime
    batch: int
    """Number of samples, or of rows of offline data, of a step."""
    devices_idle: float | None = None
    """Share of the time in which neither engines nor trainer work, if they share devices."""


@dataclass(frozen=True)
class StepTimes:
    layouts: Sequence[LayoutTime]
    notes: Sequence[str]
    speeds: Mapping[str, float]
    left_out: Mapping[str, str] = field(default_factory=dict)
    """{name of a layout: why this run file cannot have it}."""

    def as_json(self) -> dict[str, Any]:
        layouts = [
            {
                "name": layout.name,
                "options": dict(layout.options),
                **asdict(layout.time),
                "devices_idle": layout.devices_idle,
            }
            | {"per_second": layout.batch / layout.time.step}
            for layout in self.layouts
        ]
        return {
            "layouts": layouts,
            "left_out": dict(self.left_out),
            "notes": list(self.notes),
            "speeds": dict(self.speeds),
        }

    def table(self) -> Table:
        from rich.table import Table

        table = Table(title="Step time", title_justify="left")
        shared = any(layout.devices_idle is not None for layout in self.layouts)
        numbers = ["s/step", "samples/s", "waits [s]", "learns [s]", "syncs [s]", "trainer idle", "engines idle"]
        table.add_column("layout")
        table.add_column("options", overflow="fold")
        for column in [*numbers, *(["devices idle"] if shared else [])]:
            table.add_column(column, justify="right")
        for layout in self.layouts:
            time = layout.time
            row = [f"{time.step:.2f}", f"{layout.batch / time.step:.3g}"]
            row += [f"{seconds:.2f}" for seconds in (time.generate, time.learn, time.sync)]
            idle = (time.trainer_idle, time.engines_idle, layout.devices_idle)
            row += ["" if share is None else f"{share:.0%}" for share in idle]
            flags = " ".join(f"--{path} {value}" for path, value in layout.options.items())
            table.add_row(layout.name, flags or "as in this run file", *row[: len(table.columns) - 2])
        return table

    def lines(self) -> Iterator[str]:
        yield from self.notes
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            yield f"not possible: {'; '.join(names)}. {reason}"


def step_times(args: argparse.Namespace, run: RunPlugins, places: Mapping[str, Place]) -> StepTimes | None:
    """The step times that the flags request; None: no step times.

    Raises ConfigError if the speeds are unknown, or belong to another kind of run.
    """
    values = {name: value for name in FLAGS if (value := getattr(args, name.replace("-", "_"))) is not None}
    if args.speeds is None and not values:
        return None
    if not run.online:
        return _offline(args.speeds, values, run)
    if run.config.stream.replay is not None:
        raise ConfigError("stream.replay is set, so nothing is sampled and there is no step time to plan. Remove it.")
    measured = None if args.speeds is None else _measured(args.speeds, values, run)
    speeds = _with_flags(measured, values, run)
    engines = places.get(GENERATOR, Place())
    layouts, left_out = [], {}
    batch = run.config.data.batch_size * run.config.sampling.samples_per_prompt
    one_place = engines.share is not None or "in_process" in run.parts["launcher"].resolved.cls.capabilities
    settings = training_settings(run.config, run.algorithm.needs(), lambda note: None)
    for name, options, layout in _layouts(run):
        if problems := [*sampling.stream(layout), *sections.curriculum(layout)]:
            left_out[name] = problems[0]
            continue
        if layout.config.sync.in_flight != "continue":
            left_out[name] = (
                f"sync.in_flight = {layout.config.sync.in_flight!r} cannot be planned; only 'continue' can."
            )
            continue
        stream = layout.config.stream
        time = virtual_run(speeds, stream, settings, run.config.data.batch_size, engines.ranks, _limit(run))
        # In waves, engines and trainer of one place never work at the same time, so the shares of their work add up.
        idle = max(0.0, time.trainer_idle + time.engines_idle - 1) if one_place and stream.mode == "waves" else None
        layouts.append(LayoutTime(name, options, time, batch, idle))
    figures = {name: value for name, value in vars(speeds).items() if name != "groups"} | {"tokens": speeds.tokens}
    return StepTimes(layouts, list(_notes(args.speeds, measured, speeds, batch)), figures, left_out)


def _layouts(run: RunPlugins) -> Iterator[tuple[str, dict[str, str], RunPlugins]]:
    """(name, options as flags, the run with them). The first is the layout of the run file, without flags."""
    section = run.config.stream
    differences = [
        f"{option} {value}" for option, plain in PLAIN.items() if (value := getattr(section, option)) != plain
    ]
    yield ", ".join([section.mode, f"staleness {section.staleness}", *differences]), {}, run
    for mode, staleness in LAYOUTS:
        stream = section.model_copy(update={"mode": mode, "staleness": staleness, **PLAIN})
        if stream == section:
            continue
        sync: dict[str, Any] = {} if mode == "continuous" else {"in_flight": "continue", "keys": "recompute"}
        update = {"stream": stream, "sync": run.config.sync.model_copy(update=sync)}
        options = {"stream.mode": mode, "stream.staleness": str(staleness)}
        yield f"{mode}, staleness {staleness}", options, replace(run, config=run.config.model_copy(update=update))


def _limit(run: RunPlugins) -> int | None:
    """Largest number of concurrent samples."""
    env, section = run.parts.get("env"), run.config.env
    limits = [None if run.rollout is None else run.rollout.concurrency]
    if env is not None and section is not None:
        limits.append(Episodes(env.resolved, env.config, section).limit)
    return min((limit for limit in limits if limit is not None), default=None)


def _measured(folder: Path, values: Mapping[str, str], run: RunPlugins) -> Measured:
    record = _record(folder, run, () if "tokens-per-second" in values else SAMPLING)
    _record(folder, run, () if "learn-seconds" in values else LEARNING)
    if record.option("sync.in_flight") not in (None, "continue"):
        raise ConfigError(
            f"--speeds {folder}: with its sync.in_flight = {record.option('sync.in_flight')!r} the time of its syncs "
            "depends on unfinished answers. Give a run with 'continue', or one in waves."
        )
    batch = record.option("data.batch_size", 1) * record.option("sampling.samples_per_prompt", 1)
    waves = record.option("stream.mode", "waves") == "waves"
    places = {name: PlacementSection(**place) for name, place in record.option("placement", {}).items()}
    return measured_speeds(folder, waves, batch, ranks_of(places, GENERATOR))


def _record(folder: Path, run: RunPlugins, options: Sequence[str]) -> RunRecord:
    """The run in ``folder``. Raises ConfigError if one of the options has another value there."""
    record = RunRecord.read(folder)
    for path in options:
        value, recorded = run.config.value(path), record.option(path)
        default = 1 if path.startswith("placement") else None
        if (default if value is None else value) != (default if recorded is None else recorded):
            flag = "--tokens-per-second" if options is SAMPLING else "--learn-seconds"
            raise ConfigError(
                f"--speeds {folder}: its {path} is {recorded!r}, here it is {value!r}, so its speeds are not those of "
                f"this run. Give a short run with the same value, or {flag}."
            )
    return record


def _with_flags(measured: Measured | None, values: Mapping[str, str], run: RunPlugins) -> Speeds:
    missing = [f"--{name}" for name in NEEDED if name not in values]
    if measured is None and missing:
        raise ConfigError(f"the step time is not known without {', '.join(missing)}; give them, or --speeds RUN")
    if measured is not None and "turns" in values:
        raise ConfigError("--turns cannot be combined with --speeds: the turns are those of the measured run")
    numbers = {name: _number(values[name], name) for name in values if "P95" not in FLAGS[name][0]}
    count = run.config.sampling.samples_per_prompt
    if measured is None:
        turns = (TurnTimes(1, 0.0),) * int(numbers.get("turns", 1))
        speeds = Speeds([GroupTimes([SampleTimes(turns)] * count)], 0.0, 0.0)
    else:
        speeds = measured.speeds
    answer, env, reward = (
        Distribution.parse(values[name], f"--{name}") if name in values else None
        for name in ("answer-tokens", "env-seconds", "reward-seconds")
    )
    speeds = with_distributions(speeds, answer, env, reward, run.config.sampling.max_new_tokens)
    if "tokens-per-second" in values:
        speeds = replace(speeds, token=1 / numbers["tokens-per-second"], per_answer=0.0, request=0.0)
    if "learn-seconds" in values:
        batch_tokens = run.config.data.batch_size * count * speeds.tokens
        speeds = replace(speeds, learn_a_token=numbers["learn-seconds"] / batch_tokens)
    if "sync-seconds" in values:
        speeds = replace(speeds, sync=numbers["sync-seconds"], pause=numbers["sync-seconds"])
    return speeds


def _number(text: str, flag: str) -> float:
    try:
        number = int(text) if flag == "turns" else float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise ConfigError(f"--{flag} is {text!r}; give a number above 0{', without a fraction' * (flag == 'turns')}")
    return number


def _notes(folder: Path | None, measured: Measured | None, speeds: Speeds, batch: int) -> Iterator[str]:
    yield (
        f"assumes {speeds.token * 1000:.3g} ms per token and {speeds.per_answer * 1000:.3g} ms more for each answer "
        f"that an engine samples at once, {speeds.request:.3g} s per request"
    )
    yield (
        f"assumes {speeds.learn(batch):.3g} s of learning for the {batch * speeds.tokens:,.0f} tokens of a batch, "
        f"{speeds.sync:.3g} s per sync, {speeds.other:.3g} s per step between the phases"
    )
    if measured is not None:
        fewest, largest = measured.answers
        yield (
            f"measured in {folder}: {measured.steps} steps, with {fewest:.0f} to {largest:.0f} answers at once on an "
            "engine. Speeds with more answers at once are extrapolated"
        )


def _offline(folder: Path | None, values: Mapping[str, str], run: RunPlugins) -> StepTimes:
    """An algorithm that learns from offline rows has only the times of its training step."""
    if folder is None or values:
        raise ConfigError(
            f"algorithm {run.algorithm.name!r} samples nothing: give --speeds RUN, and none of "
            f"{', '.join(f'--{name}' for name in FLAGS)}"
        )
    record, lines = _record(folder, run, LEARNING), step_lines(folder)
    ratio = run.config.data.batch_size / record.option("data.batch_size", 1)
    learn = mean_time(lines, "learn") * ratio
    step = learn + mean_time(lines, "data") * ratio + other_time(lines)
    time = StepTime(step, 0.0, learn, 0.0, 1 - learn / step, 0.0)
    layout = LayoutTime("training step", {}, time, run.config.data.batch_size)
    return StepTimes([layout], [f"measured in {folder}: {len(lines)} steps; nothing is sampled"], {})
