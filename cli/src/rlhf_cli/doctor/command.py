"""Check this installation, this machine, and what a run needs or has recorded."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command, Finding
from rlhf.interfaces.check import STATUSES
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import run_file_of
from rlhf_cli.command_output import note

if TYPE_CHECKING:
    from rich.table import Table
    from rlhf_runtime.jobs.mismatch import Mismatch

    from rlhf_cli.doctor.examine import Request

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}
SAMPLES = 32
REMEDIES = {
    "arithmetic (batch composition)": "the trainer computes packed sequences differently from single ones: report this",
    "stale weights (as recorded)": "lower stream.staleness or stream.round, or set an importance correction",
    "arithmetic": "give policy.dtype and the generator's dtype the same value, or set an importance correction",
    "cut distribution": "remove sampling.top_p, top_k and min_p, or set an importance correction",
    "temperature": (
        "the generator reports log-probs without the temperature: let it report log-probs of the distribution that it "
        "samples from"
    ),
    "template": (
        "the prompts that the generator read differ from the recorded ones: give both the same tokenizer and template"
    ),
    "end tokens": "the generator reports other values for tokens that end a turn: compare its end tokens",
    "adapters (absent)": "the generator samples without the adapters: set sync.check = 'fail'",
    "adapters (merged in bf16)": (
        "the generator's weights lose a part of the adapters to rounding: let it keep fp32 weights, or set "
        "sync.adapters = 'alone' for a generator that computes in fp32"
    ),
    "experts": "set trainer.router_replay; if it is set, the recorded experts are not the experts that sampled",
}
OLDER = "the generator missed a sync: set sync.check = 'fail'"


class Doctor(Command):
    """Check this installation and this machine. With a run file or flags, also check what that run needs. With the
    folder of a run, compare the log-probs of its generator and its trainer: `rlhf doctor RUN`.

    Each check is shown when it ends: its name, the result (ok, warn, fail, skipped), what was found and what to do. The
    exit code is 1 if a check fails. Packages are imported in child processes. Only the names of environment variables
    are shown.

    For the folder of a run, the model is loaded and recomputes the log-probs of recorded samples. The report shows the
    difference by position in the context, and its cause.
    """

    name = "doctor"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        parser.add_argument("--json", action="store_true", help="one JSON object")
        parser.add_argument("--start", action="store_true", help="also start and stop services, such as Ray")
        parser.add_argument(
            "--timeout", type=float, metavar="SECONDS", help="time limit for importing one package (default: 120)"
        )
        parser.add_argument("--step", type=int, metavar="N", help="for the folder of a run: step of the samples")
        parser.add_argument(
            "--samples", type=int, metavar="N", help="for the folder of a run: samples to compare (default: 32)"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.doctor.examine import Request, examine

        if args.run_file is not None and Path(args.run_file).is_dir():
            return _examine_run(args)
        if args.step is not None or args.samples is not None:
            raise ConfigError("--step and --samples apply to the recorded samples of a run: name the folder of a run.")
        timeout = 120.0 if args.timeout is None else args.timeout
        if not timeout > 0:
            raise ConfigError(f"--timeout {timeout:g}: it must be more than 0 seconds")
        request = Request(args.run_file, overrides(args), args.start, timeout)
        checks = list(examine(request)) if args.json else _printed(request)
        failed = any(check.status == "fail" for check in checks)
        if args.json:
            summary = {"status": "fail" if failed else "ok", "checks": [asdict(check) for check in checks]}
            sys.stdout.write(json.dumps(summary, indent=2) + "\n")
        return 1 if failed else 0


def _printed(request: Request) -> list[Finding]:
    """The findings. Each is printed as soon as it is known, also to a pipe. A terminal also shows the name of the
    current check, because some checks take seconds."""
    from rich.console import Console

    from rlhf_cli.doctor.examine import examine

    console, errors = Console(), Console(stderr=True)
    watched = next((c for c in (console, errors) if c.is_terminal), None)
    status = watched.status("looking") if watched else None
    checks = []
    console.print(_row("check", "status", "result, and what to do", "bold"))
    with status or nullcontext():
        for check in examine(request, lambda name: status.update(f"looking at {name}") if status else None):
            todo = f"\nTo do: {check.remedy}" if check.remedy else ""
            console.print(_row(check.name, check.status, check.text + todo, STYLES[check.status]))
            checks.append(check)
    counts = Counter(check.status for check in checks)
    console.print(", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status]))
    return checks


def _row(name: str, status: str, text: str, style: str) -> Table:
    """A line of a table. All lines have the same columns."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(width=15, overflow="fold")
    row.add_column(width=7)
    row.add_column(ratio=1)
    row.add_row(Text(name), Text(status, style), Text(text))
    return row


def _examine_run(args: argparse.Namespace) -> int:
    """Examine the run in the folder ``args.run_file`` and print the result."""
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.load import load, look_for_models
    from rlhf_runtime.jobs.mismatch import examine, weights_kept
    from rlhf_runtime.report.recorded_samples import recorded_steps, samples_file

    folder = Path(args.run_file)
    if args.start or args.timeout is not None:
        raise ConfigError(
            "--start and --timeout are for checks of the installation; omit them for the folder of a run."
        )
    max_samples = SAMPLES if args.samples is None else args.samples
    if max_samples < 1:
        raise ConfigError(f"--samples {max_samples}: the number of samples to compare must be at least 1.")
    step = args.step
    if step is None:
        checkpoints = weights_kept(folder)
        step = max((step for step in recorded_steps(folder) if step - 1 in checkpoints), default=None)
    file, number = samples_file(folder, step)
    assert number is not None, "a folder has samples by step"
    config = load(run_file_of(folder), overrides(args))
    look_for_models(config)
    result = examine(config, Plugins.discover(), folder, file, number, max_samples, note)
    if args.json:
        sys.stdout.write(json.dumps({**asdict(result), "verdict": verdict(result)}, indent=2) + "\n")
    else:
        _print_gap(result)
    return 0


def verdict(result: Mismatch) -> str:
    """One sentence with the causes, and what to do."""
    gap = f"The gap is {_nats(result.gap)} a token"
    if result.gap <= result.floor and not result.causes:
        return f"{gap}: generator and trainer agree, up to rounding."
    if not result.causes:
        reason = "the engine may compute with other weights."
        if result.approximation:
            reason = (
                f"{result.approximation} makes the engine compute less precisely than the trainer; this cause is not "
                "examined."
            )
        if result.unkept:
            reason = (
                f"the weights of the versions {result.unkept}, which sampled tokens here, are not kept. Run with "
                "--checkpoint.every 1 and a larger --checkpoint.keep to examine them."
            )
        return f"{gap}, and no cause that could be examined explains it: {reason}"
    names = [f"{cause} ({result.ways[cause]})" if cause in result.ways else cause for cause in result.causes]
    rest = f"without {'it' if len(result.causes) == 1 else 'them'} {_nats(result.left)} would remain"
    if "arithmetic" in result.causes and result.rounding is not None and result.left > result.floor:
        part = "it" if result.left == result.gap else f"the rest, {_nats(result.left)},"
        rest = f"{part} is about as large as the difference between bf16 and fp32, {_nats(result.rounding)}"
    todo = "; ".join(
        OLDER if "older" in name else REMEDIES.get(name) or REMEDIES[name.split(" (")[0]] for name in names
    )
    return f"{gap}, because of {' and '.join(names)}: {rest}. To do: {todo}."


def _print_gap(result: Mismatch) -> None:
    from rich.table import Table
    from rich.text import Text

    from rlhf_cli.runs.output import terminal

    console = terminal()
    console.print(
        f"step {result.step}: {result.tokens} tokens of {result.samples} samples, trainer in {result.dtype}; gap "
        f"{_nats(result.gap)} a token, kl_generator {result.kl:.3g}"
    )
    if result.reproduced is not None:
        console.print(f"the trainer's log-probs differ from the recorded log-probs by {_nats(result.reproduced)}")
    places = Table("position", "tokens", "gap", box=None)
    for part in result.bins:
        places.add_row(f"{part.first} to {part.last}", str(part.tokens), f"{part.gap:.3g}")
    console.print(places)
    causes = Table("cause", "gap left", "experiment", box=None)
    causes.add_row("(none)", f"{result.gap:.3g}", "the trainer as it computed in the run")
    for e in result.experiments:
        causes.add_row(e.cause, "-" if e.gap is None else f"{e.gap:.3g}", Text(e.note))
    console.print(causes)
    packed = f"Packing a sequence with others changes the trainer's log-probs by {_nats(result.composition)}"
    if result.rounding is not None:
        packed += f", bf16 in place of fp32 by {_nats(result.rounding)}"
    console.print(f"{packed}.", soft_wrap=True)
    console.print(Text(verdict(result), "bold"), soft_wrap=True)


def _nats(value: float) -> str:
    return f"{value:.3g} nats"


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [Doctor]
