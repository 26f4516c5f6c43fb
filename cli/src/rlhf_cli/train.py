"""Run an algorithm: rlhf train run.toml, or --algo NAME --model PATH --data FILE."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from rlhf import hookimpl
from rlhf.errors import ModelError
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_run_file, overrides

if TYPE_CHECKING:
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.runfile import RunFile
    from rlhf_runtime.setup.prepare import Prepared


class TrainCommand(Command):
    """Run an algorithm: `rlhf train run.toml`, or `rlhf train --algo NAME --model PATH --data FILE [--reward REF] ...`.

    Every field of the run file is a dotted flag: `--algorithm.loss.clip_high 0.28`, `--reward.math.weight 2`. Flags
    override the file. `--dry-run` checks everything that can be checked without loading a model, and shows the
    resolved configuration.
    """

    name = "train"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        group = parser.add_mutually_exclusive_group()
        group.add_argument("--quiet", action="store_true", help="show notes and errors only")
        group.add_argument(
            "--json", action="store_true", help="one JSON object per step, as in metrics.jsonl, and one at the end"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="resolve and check everything, then stop without loading a model"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load, look_for_models

        config = load(args.run_file, overrides(args))
        look_for_models(config)
        plugins = Plugins.discover()
        if args.dry_run:
            _show_plan(_show_run(config, plugins))
            return 0
        with standard_streams():
            return _train(config, plugins, args)


def _train(config: RunFile, plugins: Plugins, args: argparse.Namespace) -> int:
    from rlhf_runtime.setup.build import train

    finished = train(config, plugins, "quiet" if args.quiet else "json" if args.json else "all")
    if args.quiet:
        return finished.exit_code
    if args.json:
        end = {"status": finished.status, "path": str(finished.directory.path), "steps": finished.steps_done}
        sys.stdout.write(json.dumps(end) + "\n")
        return finished.exit_code
    way = f" (continue with: {command})" if (command := finished.continue_with) else ""
    sys.stdout.write(f"{finished.outcome}: {finished.directory.path}{way}\n")
    if finished.report is not None:
        sys.stdout.write(f"report: {finished.report}\n")
    return finished.exit_code


class _RunStream:
    """A standard stream of a run. The run continues if the stream cannot be written: on a full disk, into a closed
    pipe, to a terminal that no longer exists. ``metrics.jsonl`` and ``manifest.json`` have its steps and notes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """The run inside continues if standard output or standard error cannot be written."""
    out, err = sys.stdout, sys.stderr
    try:
        with contextlib.redirect_stdout(_RunStream(out)), contextlib.redirect_stderr(_RunStream(err)):
            yield
    finally:
        try:
            out.flush()
        except OSError:  # its remaining content is lost: it would fail again when Python exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def _show_run(config: RunFile, plugins: Plugins) -> Prepared:
    """Check the run, and show its resolved configuration as TOML and what it would do as comments."""
    from rlhf_runtime.config.load import to_toml
    from rlhf_runtime.setup.build import row_check
    from rlhf_runtime.setup.prepare import prepare
    from rlhf_runtime.setup.resume import check_output

    prepared = prepare(config, plugins)
    notes = check_output(prepared)
    checked = row_check(prepared)
    checked.start()
    left_out = checked.wait()
    sys.stdout.write(to_toml(prepared.config))
    sys.stdout.write("\n# What this run would do\n")
    sys.stdout.write(f"# steps: {prepared.total_steps}, {prepared.data.rows_per_epoch} rows per epoch\n")
    for note in filter(None, (*prepared.notes, *notes, left_out)):
        sys.stdout.write(f"# {note}\n")
    for name, spec in prepared.specs.items():
        kind = "trained" if spec.role.trained else "frozen"
        updates = f", {spec.total_updates} optimizer steps" if spec.role.trained else ""
        sys.stdout.write(f"# role {name}: {spec.path} ({spec.role.head} head, {kind}{updates})\n")
    for plugin in prepared.plugins:
        sys.stdout.write(f"# plugin {plugin}\n")
    return prepared


def _show_plan(prepared: Prepared) -> None:
    """Placement and memory in a few comments, as `rlhf plan` shows them. A run may train a model whose memory cannot be
    estimated."""
    from rlhf_cli.plan.command import target
    from rlhf_cli.plan.report import planned, summary

    try:
        plan, notes = planned(prepared, target())
        sys.stdout.write("".join(f"# {line}\n" for line in [*summary(plan), *notes]))
    except ModelError as error:
        sys.stdout.write(f"# placement and memory: not estimated: {' '.join(str(error).split())}\n")


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [TrainCommand]
