"""Score a model's answers on data."""

from __future__ import annotations

import argparse
import json
import sys

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import OF_A_RUN


class EvalCommand(Command):
    """Score a model's answers: `rlhf eval --model PATH --data FILE --reward plugin:math`, or `rlhf eval run.toml`.

    A run file's [eval], [sampling], rewards, rollout and environment are used; its algorithm is not. `--data` names the
    rows. `--eval.samples 8` samples several answers per prompt (pass@k, avg@k), with `--eval.temperature 1`.
    """

    name = "eval"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(
            parser, OF_A_RUN, {"model": "model that answers: a folder or a hub name", "data": "rows to answer"}
        )
        parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
        parser.add_argument(
            "--save", type=path_argument, metavar="FILE.jsonl", help="write every answer with its rewards there"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.jobs.run_files import check_folder, load_for_answers

        check_folder(args.save)
        config, plugins = load_for_answers(args.run_file, overrides(args, {"data": "data.eval"}))
        from rlhf_runtime.jobs.inference import evaluate_model

        metrics, *_ = evaluate_model(config, plugins, save=args.save)
        if args.json:
            sys.stdout.write(json.dumps(metrics) + "\n")
        else:
            width = max(map(len, metrics))
            sys.stdout.write("".join(f"{name.ljust(width)}  {value:.4g}\n" for name, value in metrics.items()))
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [EvalCommand]
