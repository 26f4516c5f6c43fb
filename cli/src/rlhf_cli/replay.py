"""Train again on the samples that a run trained on."""

from __future__ import annotations

import argparse
import sys

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import dotted

from rlhf_cli.command_input import run_file_of
from rlhf_cli.command_output import note
from rlhf_cli.train import standard_streams


class ReplayCommand(Command):
    """Train again on the samples that a run trained on: `rlhf replay RUN --output FOLDER`.

    Nothing is sampled for training: tokens, log-probs, rewards and the order of batches are those in RUN's rollouts/.
    The run file is RUN's own. So a run whose samples depended on the clock can be repeated. With one rank of the same
    trainer it ends with the same weights, bit for bit, unless RUN was resumed with more steps: its learning rates are
    then those of a run that had so many steps from the start. Dotted flags change where it runs, for example
    --launcher.use local. Options that the plugin of such a flag does not have are left out with a note, and so is
    [placement] if the launcher has one process.
    """

    name = "replay"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=path_argument, metavar="RUN", help="folder of the run")
        parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="run directory of the replay")
        parser.add_argument(
            "--steps", metavar="N", help="replay the first N steps, with the learning rates of the whole run"
        )
        parser.add_argument("--resume", action="store_true", help="continue a replay that was stopped")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load, look_for_models
        from rlhf_runtime.setup.build import train

        run_file = run_file_of(args.run)
        resume = str(args.resume).lower()
        flags = [("stream.replay", str(args.run)), ("run.output", args.output), ("run.resume", resume)]
        if args.steps is not None:
            flags.append(("run.stop_after", args.steps))
        left_out: list[str] = []
        config = load(run_file, [*flags, *dotted(args.overrides)], left_out=left_out)
        if left_out:
            note(f"left out, because the plugins chosen by flags do not read these options: {', '.join(left_out)}")
        look_for_models(config)
        with standard_streams():
            finished = train(config, Plugins.discover())
            sys.stdout.write(f"{finished.outcome}: {finished.directory.path}\n")
            if finished.report is not None:
                sys.stdout.write(f"report: {finished.report}\n")
        return finished.exit_code


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ReplayCommand]
