"""Score a model's answers on data, or compute the losses of an algorithm."""

from __future__ import annotations

import argparse
import json
import sys

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import OF_A_RUN


class EvalCommand(Command):
    """Score a model's answers: `rlhf eval --model PATH --data FILE --reward plugin:math`, or `rlhf eval run.toml`.

    A run file's [eval], [sampling], rewards, rollout and environment are used; its algorithm is not. `--data` names the
    rows. `--eval.samples 8` samples several answers per prompt (pass@k, avg@k), with `--eval.temperature 1`.

    `rlhf eval --algo prm --model runs/prm/model --data FILE` computes what a run of an algorithm that learns from rows
    (`prm`, `reward_model`, `sft`, `dpo`) reports of held-out rows. Nothing is answered.
    """

    name = "eval"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(
            parser,
            [flag for flag in OF_A_RUN if flag != "algo"],
            {
                "model": "model to evaluate: a folder or a hub name",
                "data": "rows of the evaluation",
                "algo": "algorithm whose losses on the rows are computed; no answers are sampled",
            },
        )
        parser.add_argument("--json", action="store_true", help="print the metrics as one JSON object")
        parser.add_argument(
            "--save", type=path_argument, metavar="FILE.jsonl", help="write every answer with its rewards to this file"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.jobs.run_files import check_folder, load_for_answers, load_for_losses

        flags = overrides(args, {"data": "data.eval"})
        if args.algo is not None:
            if args.save is not None:
                raise ConfigError(
                    "--save writes answers, but with --algo no answers are sampled. Remove one of the two."
                )
            config, plugins = load_for_losses(args.run_file, flags)
            from rlhf_runtime.jobs.inference import evaluate_rows

            metrics = evaluate_rows(config, plugins)
        else:
            check_folder(args.save)
            config, plugins = load_for_answers(args.run_file, flags)
            from rlhf_runtime.jobs.inference import evaluate_model

            metrics, *_ = evaluate_model(config, plugins, save=args.save)
        if args.json:
            sys.stdout.write(json.dumps(metrics) + "\n")
        else:
            from rlhf_cli.runs.curves import number

            width = max(map(len, metrics))
            sys.stdout.write("".join(f"{name.ljust(width)}  {number(value)}\n" for name, value in metrics.items()))
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [EvalCommand]
