"""Runs as text for a terminal: one (`rlhf show RUN`), or two side by side (`rlhf show RUN OTHER`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.text import Text
from rlhf.errors import CheckpointError
from rlhf.plugins.resolved import IN_PROCESS
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.observe.sample_lines import printable
from rlhf_runtime.output.run_directory import step_files
from rlhf_runtime.report.run_facts import OF_A_CALL, plugin_row
from rlhf_runtime.report.run_record import RunRecord, few, value_text

from rlhf_cli.runs.curves import STYLES, History, draw, number
from rlhf_cli.runs.output import STATE_STYLES, has_colour, table

CURVES = ("reward", "loss", "pass@1", "eval loss")
"""Labels of the metrics that are drawn if no metric is named (:data:`rlhf_runtime.observe.progress.HEADLINE`)."""
NOT_COMPARED = ("run.name", "run.output", "run.resume")
"""Options for the folder and the name of a run, which are not compared."""
ABSENT = object()
TIME = "%Y-%m-%d %H:%M"


def print_run(console: Console, record: RunRecord, history: History, metrics: Sequence[str]) -> None:
    """Print a run.

    Args:
        metrics: metrics to show; if empty, those that a run shows in its progress.
    """
    _print_title(console, record)
    _print_options(console, record)
    _print_plugins(console, record)
    _print_progress(console, record, history)
    _print_metrics(console, history, metrics)
    _print_files(console, record)
    _print_end(console, record)
    for problem in record.problems:
        if problem != history.problem:
            console.print(f"note: {problem}", style="yellow", soft_wrap=True)


def _print_title(console: Console, record: RunRecord) -> None:
    name = record.option("run.name") or record.path.resolve().name
    state, _ = record.state
    console.print(Text.assemble((f"{printable(name)}: ", "bold"), (state, STATE_STYLES[state])))
    facts = {
        "folder": str(record.path),
        "algorithm": record.algorithm,
        "model": record.model,
        "data": record.data,
        "started": ", ".join(few([time.strftime(TIME) for time in record.started])),
        "last change": record.time.strftime(TIME),
    }
    _print_pairs(console, {key: value for key, value in facts.items() if value})


def _print_options(console: Console, record: RunRecord) -> None:
    if not record.config:
        return
    paths = record.options_changed
    if paths is None:
        _print_heading(console, "Options")
        console.print(
            "  This run does not record which options differ from their defaults. All of them, with defaults, are in "
            f"{record.path / 'config.toml'}.",
            soft_wrap=True,
        )
        return
    values = {path: record.option(path, ABSENT) for path in paths}
    _print_heading(console, "Options that differ from their defaults")
    texts = {path: value_text(value) for path, value in values.items() if value is not ABSENT and path not in OF_A_CALL}
    _print_pairs(console, texts)


def _print_plugins(console: Console, record: RunRecord) -> None:
    if record.plugins:
        _print_heading(console, "Plugins")
        grid = table("", "", "")
        for plugin in record.plugins:
            kind, name, source = plugin_row(plugin)
            grid.add_row(f"  {kind}", name, source)
        grid.show_header = False
        console.print(grid)


def _print_progress(console: Console, record: RunRecord, history: History) -> None:
    _print_heading(console, "Progress")
    total, seconds = record.total_steps, history.seconds_a_step()
    text = f"  {record.steps_done} of {total or 'an unknown number of'} steps"
    if total:
        text += f" ({100 * record.steps_done / total:.0f} %)"
    if seconds is not None:
        text += f", {seconds:.3g} s a step"
        if total and record.state[0] == "running":
            left = timedelta(seconds=round(seconds * (total - record.steps_done)))
            text += f", about {left} left"
    if isinstance(epoch := record.last.get("epoch"), int | float):
        text += f", {epoch:.3g} passes over the data"
    console.print(text)


def _print_metrics(console: Console, history: History, metrics: Sequence[str]) -> None:
    names = list(metrics) or history.headline()
    if history.problem:
        _print_heading(console, "Metrics")
        console.print(f"  no metric can be shown: {history.problem}", style="yellow", soft_wrap=True)
    if not names:
        return
    _print_heading(console, "Metrics")
    grid = table("  metric", ">first", ">last", ">lowest", "at step", ">highest", "at step")
    for name in names:
        extremes = history.extremes(name)
        if extremes is None:
            continue
        ends = [
            ("", "") if end is None else (number(end[0]), str(end[1])) for end in (extremes.lowest, extremes.highest)
        ]
        grid.add_row(f"  {name}", number(extremes.first), number(extremes.last), *ends[0], *ends[1])
    console.print(grid)
    for curve in (history.curve(name) for name in metrics or history.headline(CURVES)):
        if not curve.varies:
            continue
        console.print()
        console.print(f"  {curve.name}", style="bold")
        console.print(_indented(draw([curve], has_colour(console))))


def _print_files(console: Console, record: RunRecord) -> None:
    _print_heading(console, "Checkpoints and exports")
    store = CheckpointStore(record.path)
    try:
        complete, problem = store.complete(), "none"
    except CheckpointError as error:
        complete, problem = [], str(error)
    marked = [checkpoint.step for checkpoint in complete if checkpoint.best is not None]
    facts = {"checkpoints": _steps([checkpoint.step for checkpoint in complete]) or problem}
    if marked:
        facts["best checkpoint"] = f"step {marked[-1]}"
    if record.best is not None:
        facts["best value"] = f"{record.best.metric} {number(record.best.value)} (step {record.best.step})"
    if exports := _steps_in(record.path / "exports"):
        facts["exports"] = exports
    if models := sorted(path.name for path in record.path.glob("model*") if path.is_dir()):
        facts["models"] = ", ".join(str(record.path / name) for name in models)
    if samples := _steps_in(record.path / "rollouts"):
        facts["samples"] = f"{samples}; `rlhf samples {shlex.quote(str(record.path))} --worst 5` shows some"
    if skipped := _steps_in(record.path / "skipped"):
        facts["skipped updates"] = f"{skipped}; their batches are in {record.path / 'skipped'}"
    _print_pairs(console, facts)


def _print_end(console: Console, record: RunRecord) -> None:
    state, cause = record.state
    _print_heading(console, "How it goes" if state == "running" else "How it ended")
    reason = f": {printable(cause)}" if cause else ""
    console.print(_indented(Text.assemble((state, STATE_STYLES[state]), reason)), soft_wrap=True)
    if (advice := next_step(record)) is not None:
        console.print(f"  {advice[0]}:")
        console.print(f"    {advice[1]}", soft_wrap=True)


def next_step(record: RunRecord) -> tuple[str, str] | None:
    """(possible next action for the run, its command or the reason); None for a run that is still running."""
    state, model, config = record.state[0], record.path / "model", record.path / "config.toml"
    if record.is_complete and model.is_dir():
        return "Try the model", f"rlhf generate --model {shlex.quote(str(model))} --prompt TEXT"
    if state not in ("stopped", "failed") or record.is_complete or not config.is_file():
        return None
    try:
        newest = CheckpointStore(record.path).newest()
    except CheckpointError as error:
        return "It cannot be resumed as it is", str(error)
    start = "from step 0, as there is no checkpoint" if newest is None else f"after step {newest.step}"
    if any(plugin.get("distribution") == IN_PROCESS for plugin in record.plugins):
        return (
            f"Continue {start}, in Python and with the same objects",
            f"rlhf.train(..., output={str(record.path)!r}, resume=True)",
        )
    moved = Path(str(record.option("run.output", ""))).resolve() != record.path.resolve()
    output = f" --output {shlex.quote(str(record.path))}" if moved else ""
    last = record.option("run.stop_after")
    ends_here = state == "stopped" and type(last) is int and last <= record.steps_done
    flag = f" --run.stop_after {record.total_steps}" if ends_here else ""
    return f"Continue {start}", f"rlhf train {shlex.quote(str(config))}{output} --resume{flag}"


def _print_heading(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _print_pairs(console: Console, pairs: dict[str, str]) -> None:
    width = max(map(len, pairs), default=0)
    for key, value in pairs.items():
        console.print(f"  {key.ljust(width)}  {value}", soft_wrap=True)


def _indented(text: Text) -> Text:
    return Text("\n").join(Text.assemble("  ", line) for line in text.split("\n"))


def _steps_in(folder: Path) -> str:
    """The steps that have files in a folder, as text."""
    return _steps(list(dict.fromkeys(step for step, _ in step_files(folder))))


def _steps(steps: Sequence[int]) -> str:
    """``step 3``, ``steps 1 to 40``, or ``12 steps, from 1 to 40``."""
    if not steps:
        return ""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 6:
        return f"steps {', '.join(map(str, steps))}"
    is_range = steps[-1] - steps[0] + 1 == len(steps)
    return f"steps {steps[0]} to {steps[-1]}" if is_range else f"{len(steps)} steps, from {steps[0]} to {steps[-1]}"


def print_comparison(
    console: Console, records: tuple[RunRecord, RunRecord], histories: tuple[History, History], metrics: Sequence[str]
) -> None:
    """Print two runs side by side.

    Args:
        metrics: metrics to show; if empty, those that a run shows in its progress.
    """
    names = [str(record.path) for record in records]
    grid = table("", *names)
    grid.add_row("algorithm", *(record.algorithm for record in records))
    grid.add_row("model", *(record.model for record in records))
    grid.add_row("state", *(record.state[0] for record in records))
    grid.add_row("steps", *(f"{record.steps_done} of {record.total_steps or '?'}" for record in records))
    bests = [record.best for record in records]
    if any(bests):
        grid.add_row("best", *(f"{b.metric} {number(b.value)} (step {b.step})" if b else "" for b in bests))
    console.print(grid)
    _print_differences(console, "Options that differ", names, _differences(*map(_options, records)))
    _print_differences(console, "Plugins that differ", names, _differences(*(_plugins(record) for record in records)))
    _print_both_metrics(console, names, histories, metrics)
    for record, history in zip(records, histories, strict=True):
        for problem in dict.fromkeys(filter(None, [*record.problems, history.problem])):
            console.print(f"note: {record.path}: {problem}", style="yellow", soft_wrap=True)


def _options(record: RunRecord) -> dict[str, str]:
    return {path: text for path, text in record.options.items() if path not in NOT_COMPARED}


def _plugins(record: RunRecord) -> dict[str, str]:
    """{kind and name: distribution with version, or the reference of a file}."""
    return {
        f"{p.get('kind')} {p.get('name')}": f"{p.get('distribution')} {p.get('version') or p.get('sha256', '')[:12]}"
        for p in record.plugins
    }


def _differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[tuple[str, str, str]]:
    keys = [*first, *(key for key in other if key not in first)]
    return [(key, first.get(key, "-"), other.get(key, "-")) for key in keys if first.get(key) != other.get(key)]


def _print_differences(console: Console, title: str, names: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    console.print()
    if not rows:
        console.print(f"{title}: none", style="bold")
        return
    grid = table("", *names, title=title)
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _print_both_metrics(
    console: Console, names: Sequence[str], histories: tuple[History, History], metrics: Sequence[str]
) -> None:
    rows = list(metrics) or list(dict.fromkeys(name for history in histories for name in history.headline()))
    if not rows:
        return
    console.print()
    grid = table("", *(f">{name}" for name in names), title="Metrics, first -> last")
    for name in rows:
        extremes = [history.extremes(name) for history in histories]
        grid.add_row(name, *(f"{number(f.first)} -> {number(f.last)}" if f else "" for f in extremes))
    console.print(grid)
    colour = has_colour(console)
    for name in metrics or dict.fromkeys(name for history in histories for name in history.headline(CURVES)):
        curves = [history.curve(name, run) for history, run in zip(histories, names, strict=True)]
        if not any(curve.varies for curve in curves):
            continue
        console.print()
        title = Text(printable(name), "bold")
        if colour:
            for run, style in zip(names, STYLES, strict=True):
                title.append("  ").append(run, style)
        console.print(title)
        console.print(draw(curves, colour))
