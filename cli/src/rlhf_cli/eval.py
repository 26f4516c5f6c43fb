"""Score a model's answers: `rlhf eval --model PATH --data FILE --reward plugin:math`, or `rlhf eval run.toml`.

A run file's [eval], [sampling], rewards, rollout and environment are used; its algorithm is not. `--data` names the
rows. `--eval.samples 8` draws several answers per prompt (pass@k, avg@k); `--eval.temperature 1` samples them.
"""

from __future__ import annotations

import argparse
import json
import sys

from rlhf_cli.flags import add_short_flags, overrides, path

OVERRIDES = True
NOT_HERE = ("algo", "eval-data", "output", "steps", "resume", "overwrite")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", nargs="?", metavar="RUN.TOML", help="run file; flags are laid over it")
    add_short_flags(parser, without=NOT_HERE)
    parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
    parser.add_argument("--save", type=path, metavar="FILE.jsonl", help="write every answer with its rewards there")


def run(args: argparse.Namespace) -> int:
    from rlhf_cli.answering import check_folder, load_for_answers

    check_folder(args.save)
    config, plugins = load_for_answers(args.run_file, overrides(args, {"data": "data.eval"}))
    from rlhf_runtime.jobs.inference import evaluate_model

    metrics, _ = evaluate_model(config, plugins, progress=_progress, save=args.save)
    if args.json:
        sys.stdout.write(json.dumps(metrics) + "\n")
    else:
        width = max(map(len, metrics))
        sys.stdout.write("".join(f"{name.ljust(width)}  {value:.4g}\n" for name, value in metrics.items()))
    return 0


def _progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    sys.stderr.write(f"\ranswered {done} of {total} prompts{end}")
