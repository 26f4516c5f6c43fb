"""Sample answers: `rlhf generate --model PATH --prompt "47+38="`, or `--data FILE` for many.

The best token is taken each time; `--eval.temperature 0.7` draws, and `--eval.samples 4` so many answers to each prompt
then. `--sampling.max_new_tokens 64` bounds them. `--save FILE.jsonl` writes every answer with its tokens and log-probs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rlhf_cli.flags import add_short_flags, overrides, path

OVERRIDES = True
NOT_HERE = ("algo", "reward", "eval-data", "output", "steps", "resume", "overwrite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", nargs="?", metavar="RUN.TOML", help="run file; flags are laid over it")
    add_short_flags(parser, without=NOT_HERE)
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    parser.add_argument("--save", type=path, metavar="FILE.jsonl", help="write every answer with its tokens there")


def run(args: argparse.Namespace) -> int:
    from rlhf.errors import ConfigError

    from rlhf_cli.answering import check_folder, load_for_answers

    check_folder(args.save)
    if bool(args.prompt) == bool(args.data):
        raise ConfigError("give the prompts either as --prompt TEXT (repeated for several) or as --data FILE")
    if args.prompt and not all(args.prompt):
        raise ConfigError("--prompt is empty; an answer goes on from one token at least")
    flags = overrides(args, {"data": "data.eval"})
    with tempfile.TemporaryDirectory() as folder:
        if args.prompt:
            file = Path(folder) / "prompts.jsonl"
            file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in args.prompt))
            flags.append(("data.eval", str(file)))
        config, plugins = load_for_answers(args.run_file, flags, scored=False)
        from rlhf_runtime.jobs.inference import evaluate_model

        _, groups = evaluate_model(config, plugins, save=args.save)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.status == "failed":
                raise ConfigError(f"row {group.row.index}: {trajectory.error}")
            sys.stdout.write(f"{trajectory.prompt_text}{trajectory.completion}\n")
    return 0
