"""Recorded samples as data: pairs, best of n, labels, demonstrations, scored and conditional rows."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlhf.interfaces import Command
from rlhf.paths import path_argument

FORMS = {
    "pairs": "prompt, chosen, rejected: the best answer to each prompt and the worst, where they differ",
    "best": "prompt, completion, reward: the best answers to each prompt",
    "labels": "prompt, completion, label: every scored answer, labelled true or false by its reward",
    "demonstrations": "prompt, completion: every answer",
    "scored": "prompt, completion, reward: every scored answer",
    "conditional": "prompt with the reward in it, completion, reward: every scored answer, rewards as z-scores",
}
OPTIONS: dict[str, tuple[str, type, str, str]] = {
    "min_gap": ("pairs", float, "GAP", "only where the rewards differ by more than this (default: 0)"),
    "keep": ("best", int, "N", "number of answers to each prompt (default: 1)"),
    "min_reward": ("best", float, "REWARD", "only answers with at least this reward"),
    "threshold": ("labels", float, "REWARD", "answers with at least this reward are labelled true (default: 1)"),
    "condition": (
        "conditional",
        str,
        "TEXT",
        "with {prompt} and {reward} (default: '{prompt} <rm_score>: {reward:.2f} ')",
    ),
}
"""{option: (form that uses it, type, name of its value in the help, help)}."""


class DataExportCommand(Command):
    """Turn recorded samples into data: `rlhf data export runs/latest --form pairs -o pairs.jsonl`.

    Sources are run directories, their rollouts/ folders, and files of `rlhf eval --save`, `generate --save` or `score`.
    """

    name = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "sources", nargs="+", type=path_argument, metavar="SOURCE", help="run directory, its rollouts, or a file"
        )
        listed = "; ".join(f"{name}: {text}" for name, text in FORMS.items())
        parser.add_argument("--form", choices=FORMS, required=True, help=listed)
        parser.add_argument(
            "-o", "--output", type=path_argument, required=True, metavar="FILE.jsonl", help="written as JSON lines"
        )
        parser.add_argument("--force", action="store_true", help="replace the output if it exists")
        parser.add_argument(
            "--truncated", action="store_true", help="take answers that were cut off at their budget too"
        )
        for name, (form, kind, metavar, text) in OPTIONS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=f"{form}: {text}")
        parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import ConfigError, DataError
        from rlhf_runtime.checkpoint.atomic_files import write_atomic
        from rlhf_runtime.checkpoint.json_values import to_text
        from rlhf_runtime.data import export
        from rlhf_runtime.data.recorded_answers import read_answers

        options = _options(args)
        output: Path = args.output
        if output.exists() and not args.force:
            raise ConfigError(f"{output} exists; --force replaces it")
        if not output.parent.is_dir():
            raise ConfigError(f"there is no folder {output.parent} to write {output.name} into")
        recorded = read_answers(args.sources, truncated=args.truncated)
        table = getattr(export, args.form)(recorded.groups, **options)
        left_out = {f"answers {why}": n for why, n in recorded.left_out.items()} | table.left_out
        counts = {"rows": len(table.rows), "prompts": len(recorded.groups), "answers": recorded.answers}
        listing = "".join(f"\n  {n} {why}" for why, n in left_out.items() if n)
        if not table.rows:
            cut = " --truncated takes answers that were cut off." if recorded.left_out.get("cut off") else ""
            raise DataError(
                f"nothing to write: of {recorded.answers} answers none gives a row.{cut} Left out:{listing}"
            )
        write_atomic(output, "".join(to_text(row) + "\n" for row in table.rows))
        if args.json:
            sys.stdout.write(json.dumps({**counts, "left_out": {w: n for w, n in left_out.items() if n}}) + "\n")
        else:
            of = f"of {counts['answers']} answers to {counts['prompts']} prompts"
            sys.stdout.write(f"{output}: {len(table.rows)} rows {of}{'; left out:' + listing if listing else ''}\n")
        return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the form. An option that the form does not use is an error."""
    from rlhf.errors import ConfigError

    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    for name in options:
        if OPTIONS[name][0] != args.form:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for --form {OPTIONS[name][0]}; --form {args.form} does not read it")
    if options.get("keep", 1) < 1:
        raise ConfigError(f"--keep must be at least 1, got {options['keep']}")
    if options.get("min_gap", 0.0) < 0:
        raise ConfigError(f"--min-gap must be at least 0, got {options['min_gap']:g}")
    return options
