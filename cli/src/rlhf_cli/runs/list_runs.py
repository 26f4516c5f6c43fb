"""List the runs below a folder, newest first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command


class RunsCommand(Command):
    """List the runs below a folder, newest first, with the progress, the last reward or loss, and the best value of
    each.

    The folder and up to three levels below it are searched for runs. Its state is running, finished, stopped (by a
    signal or by eval.patience) or failed (by an error, or killed). `rlhf show RUN` says more about one of them.
    """

    name = "runs"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "folder", nargs="?", type=Path, default=Path("runs"), metavar="FOLDER", help="where to look (default: runs)"
        )
        parser.add_argument("--json", action="store_true", help="one JSON array with an object per run")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.checkpoint.json_values import dumps
        from rlhf_runtime.report.run_record import RunRecord, find_runs

        folder: Path = args.folder
        if not folder.is_dir():
            reason = "is a file" if folder.exists() else "does not exist"
            raise ConfigError(f"the folder {folder} {reason}. Name the folder that holds runs: `rlhf runs FOLDER`.")
        records = sorted(map(RunRecord.read, find_runs(folder)), key=lambda record: record.time, reverse=True)
        if not records and not args.json:
            raise ConfigError(
                f"there is no run in {folder} or up to three folders below it. Name another folder: `rlhf runs FOLDER`."
            )
        rows = [summary(record, folder) for record in records]
        if args.json:
            sys.stdout.write(dumps(rows, "runs", nonfinite="mark") + "\n")
        else:
            _show(rows)
        return 0


def summary(record: Any, folder: Path) -> dict[str, Any]:
    """The facts about a run in the list, as JSON values."""
    from rlhf_runtime.observe.progress import HEADLINE

    state, reason = record.state
    values = ((label, _last_value(record, HEADLINE[label])) for label in ("reward", "loss"))
    last = next(({"name": label, "value": value} for label, value in values if value is not None), None)
    best = record.best
    relative = record.path.relative_to(folder)
    return {
        "run": str(relative) if relative.parts else record.path.name,
        "path": str(record.path),
        "algorithm": record.algorithm,
        "model": record.model,
        "step": record.steps_done,
        "steps": record.total_steps,
        "state": state,
        "why": reason,
        "last": last,
        "best": None if best is None else {"metric": best.metric, "value": best.value, "step": best.step},
        "time": record.time.isoformat(timespec="seconds"),
        "problems": list(record.problems),
    }


def _last_value(record: Any, metrics: Sequence[str]) -> float | None:
    """The value in the last line with a number for one of ``metrics``. A step that was skipped, or had nothing to learn
    from, may have none."""
    from rlhf_runtime.output.metrics import as_number

    marks = [f'"{name}"'.encode() for name in metrics]
    for number in reversed(range(len(record.lines))):
        if any(mark in record.lines[number] for mark in marks):
            line = record.line(number)
            if values := [value for name in metrics if (value := as_number(line.get(name))) is not None]:
                return values[0]
    return None


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.text import Text

    from rlhf_cli.runs.curves import number
    from rlhf_cli.runs.output import STATE_STYLES, table, terminal

    grid = table("run", "algorithm", "model", ">step", "state", "last", "best", "when")
    for row in rows:
        last, best = row["last"], row["best"]
        grid.add_row(
            row["run"],
            row["algorithm"] or "?",
            Path(row["model"]).name or "?",
            f"{row['step']}/{row['steps'] or '?'}",
            Text(row["state"], STATE_STYLES[row["state"]]),
            f"{last['name']} {number(last['value'])}" if last else "",
            f"{best['metric'].removeprefix('eval/')} {number(best['value'])} (step {best['step']})" if best else "",
            row["time"][:16].replace("T", " "),
        )
    console = terminal()
    console.print(grid)
    for row in rows:
        for problem in row["problems"]:
            console.print(f"note: {row['run']}: {problem}", style="yellow", soft_wrap=True)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [RunsCommand]
