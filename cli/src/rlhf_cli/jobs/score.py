"""Score given answers."""

from __future__ import annotations

import argparse
import json
import sys

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import overrides

from rlhf_cli.command_input import add_dataset_answers
from rlhf_cli.command_output import note, require_new_file


class ScoreCommand(Command):
    """Score given answers: `rlhf score --data FILE --reward REF -o scored.jsonl`, with one reward or several.

    Rows hold a prompt and one answer or a list of answers, in a column that --answers names or that is called
    response(s) or completion(s). The rewards, their models and [data] of a run file are used; nothing is sampled and no
    policy is loaded.
    """

    name = "score"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_dataset_answers(parser, "a reward's model")
        text = "written as JSON lines"
        parser.add_argument(
            "-o", "--output", dest="file", type=path_argument, required=True, metavar="FILE.jsonl", help=text
        )
        parser.add_argument("--force", action="store_true", help="replace an existing output, and start again")
        parser.add_argument("--json", action="store_true", help="print counts and means as one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import ConfigError
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load, look_for_models

        flags = overrides(args, {"data": "data.eval"})
        config = load(args.run_file, flags, algorithm="score")
        if not config.data.eval:
            raise ConfigError("no data is named. Set --data FILE.")
        if not config.reward:
            raise ConfigError("no reward is named: there is nothing to score with. Set --reward plugin:NAME.")
        require_new_file(args.file, args.force)
        # Before the import below, which takes seconds.
        look_for_models(config)
        from rlhf_cli.jobs.score_answers import TOTAL, score_answers

        scores = score_answers(config, Plugins.discover(), args.answers, args.file, force=args.force, note=note)
        sources = {reward.label: reward.label for reward in config.reward}
        names = sources | {"weighted sum" if "reward" in sources else "reward": TOTAL}
        means = {name: scores.mean(source) for name, source in names.items()}
        left_out = {reason: n for reason, n in scores.left_out.items() if n}
        if args.json:
            counts = {"rows": scores.rows, "answers": scores.answers}
            sys.stdout.write(json.dumps({**counts, "means": means, "left_out": left_out}) + "\n")
            return 0
        sys.stdout.write(f"{args.file}: {scores.answers} answers of {scores.rows} rows\n")
        width = max(map(len, names))
        for name, mean in means.items():
            text = "no answers" if mean is None else f"mean {mean:.4g} of {scores.sums[names[name]][1]:.0f} answers"
            sys.stdout.write(f"  {name.ljust(width)}  {text}\n")
        sys.stdout.write("".join(f"  left out: {n} {reason}\n" for reason, n in left_out.items()))
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ScoreCommand]
