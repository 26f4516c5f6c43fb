"""Write the model of a checkpoint."""

from __future__ import annotations

import argparse
import sys

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import dotted

from rlhf_cli.command_input import run_file_of
from rlhf_cli.command_output import note


class ExportCommand(Command):
    """Write a checkpoint's model in Hugging Face format: `rlhf export RUN --best --output FOLDER`.

    The run file is RUN's own; its trainer loads the checkpoint. If the run keeps a moving average of the weights, that
    is exported, as in model/. Dotted flags change where it runs, for example --launcher.use local.
    """

    name = "export"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=path_argument, metavar="RUN", help="folder of the run")
        choice = parser.add_mutually_exclusive_group(required=True)
        choice.add_argument("--step", type=int, metavar="N", help="checkpoint of this step")
        choice.add_argument("--best", action="store_true", help="checkpoint of the best evaluation")
        choice.add_argument("--average", action="store_true", help="mean of the weights of all kept checkpoints")
        parser.add_argument(
            "-o", "--output", type=path_argument, required=True, metavar="FOLDER", help="new folder for the model"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load
        from rlhf_runtime.jobs.export import Which, export

        config = load(run_file_of(args.run), dotted(args.overrides))
        choice: Which = "best" if args.best else "average" if args.average else args.step
        steps = export(config, Plugins.discover(), args.run, choice, args.output, note)
        mean = f"the mean of steps {', '.join(map(str, steps))}"
        sys.stdout.write(f"{args.output}: {f'step {steps[0]}' if len(steps) == 1 else mean}\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ExportCommand]
