"""Show samples that a run was trained on: the worst, the best, or any."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command

from rlhf_cli.command_input import natural, positive

if TYPE_CHECKING:
    from rlhf_runtime.report.recorded_samples import RecordedSample

FIRST = 5
"""Number of samples that are shown by default."""


class SamplesCommand(Command):
    """Show samples of a step of a run: `rlhf samples runs/latest --step 12 --worst 5`.

    Each sample is shown with its prompt, its completion (or the turns of the policy and of the environment), the reward
    in total and by name, its length and its status. By default the first 5 samples are shown, and with --group or
    --json all. RUN may also be a file of `rlhf eval --save`, `rlhf generate --save` or `rlhf score`.
    """

    name = "samples"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run, or a file of samples")
        parser.add_argument("--step", type=positive, metavar="N", help="samples of this step (default: the last one)")
        parser.add_argument("--worst", type=positive, metavar="N", help="the N with the lowest reward")
        parser.add_argument("--best", type=positive, metavar="N", help="the N with the highest reward")
        parser.add_argument("--random", type=positive, metavar="N", help="N drawn at random, the same in every call")
        parser.add_argument("--sort-by", metavar="NAME", help="rank by this reward, or by `length`")
        parser.add_argument("--source", metavar="NAME", help="only this data source")
        parser.add_argument("--group", type=natural, metavar="N", help="only this group: the answers to one prompt")
        parser.add_argument("--full", action="store_true", help="show long texts in full")
        parser.add_argument("--json", action="store_true", help="one JSON object per sample, one per line")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.report.recorded_samples import check_sort, read_samples, samples_file, select

        path, step = samples_file(args.run_folder, args.step)
        samples = select(read_samples(path, step), args.source, args.group)
        check_sort(samples, args.sort_by)
        if args.sort_by is not None and args.worst is None and args.best is None:
            raise ConfigError("--sort-by sets what --worst and --best compare. Set one of them.")
        selections = _selections(samples, args)
        if args.json:
            _print_json(selections)
        else:
            _print(samples, selections, path, args)
        return 0


def _selections(
    samples: Sequence[RecordedSample], args: argparse.Namespace
) -> list[tuple[str, Sequence[RecordedSample]]]:
    """[(title, samples)]."""
    from rlhf_runtime.report.recorded_samples import draw_samples, extreme

    by = f" by {args.sort_by}" if args.sort_by else ""
    selections: list[tuple[str, Sequence[RecordedSample]]] = []
    if args.worst is not None:
        selections.append((f"worst{by}", extreme(samples, args.worst, args.sort_by, best=False)))
    if args.best is not None:
        selections.append((f"best{by}", extreme(samples, args.best, args.sort_by, best=True)))
    if args.random is not None:
        selections.append(("random", draw_samples(samples, args.random, seed=0)))
    if not selections:
        selections.append(("", samples if args.group is not None or args.json else samples[:FIRST]))
    return selections


def _print_json(selections: Sequence[tuple[str, Sequence[RecordedSample]]]) -> None:
    from dataclasses import asdict

    from rlhf_runtime.checkpoint.json_values import dumps

    for title, samples in selections:
        for sample in samples:
            sys.stdout.write(dumps({"chosen": title, **asdict(sample)}, "sample", nonfinite="mark") + "\n")


def _print(
    all_samples: Sequence[RecordedSample],
    selections: Sequence[tuple[str, Sequence[RecordedSample]]],
    path: Path,
    args: argparse.Namespace,
) -> None:
    from rlhf_cli.runs.output import terminal
    from rlhf_cli.runs.sample_text import sample_text

    console = terminal()
    selection = [f", {name} {value}" for name in ("source", "group") if (value := getattr(args, name)) is not None]
    heading = f"{path}{''.join(selection)}: {len(all_samples)} samples of "
    heading += f"{len({sample.group for sample in all_samples})} prompts"
    if len(selections) == 1 and not selections[0][0] and len(selections[0][1]) < len(all_samples):
        heading += f"; the first {len(selections[0][1])} are shown (others: --worst, --best, --random, --group)"
    console.print(heading, style="bold", soft_wrap=True)
    unscored = sum(sample.value(args.sort_by) is None for sample in all_samples)
    if unscored and (args.worst is not None or args.best is not None):
        console.print(f"{unscored} of them have no {args.sort_by or 'reward'}, and are not compared.", style="yellow")
    for title, samples in selections:
        for number, sample in enumerate(samples, 1):
            heading = f"{title} {number} of {len(samples)}: " if title else ""
            console.print()
            console.print(sample_text(sample, heading, args.full), soft_wrap=True)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [SamplesCommand]
