"""Check rewards before a run uses them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import overrides

from rlhf_cli.command_group import CommandGroup
from rlhf_cli.command_input import add_dataset_answers
from rlhf_cli.command_output import note


class RewardsTryCommand(Command):
    """Try rewards on answers: `rlhf rewards try --reward math --data FILE --model MODEL`, or `rlhf rewards try RUN`.

    Rows hold a prompt and one answer or a list of answers, as for `rlhf score`. RUN, the folder of a run, gives its
    last recorded samples, its data and its rewards; --reward names others. Shown are the distribution of each reward,
    groups that are constant, rewards that disagree, slow calls, calls that failed or took too long, and what answers
    get that try to cheat. A failed call ends nothing: the other answers are shown.
    """

    name = "try"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_dataset_answers(parser, "a reward's model, or of RUN")
        parser.add_argument("--step", type=int, metavar="N", help="recorded samples of this step (default: the last)")
        probes = "rows for which to score answers that try to cheat (default: 8; 0: none)"
        parser.add_argument("--probes", type=int, default=8, metavar="N", help=probes)
        parser.add_argument("--html", type=path_argument, metavar="FILE", help="also write an HTML page")

    def run(self, args: argparse.Namespace) -> int:
        run = Path(args.run_file) if args.run_file is not None and Path(args.run_file).is_dir() else None
        if args.html is not None and (args.html.is_dir() or not args.html.parent.is_dir()):
            raise ConfigError(f"--html {args.html}: name a file in a folder that exists.")
        if run is None and args.step is not None:
            raise ConfigError(
                f"--step {args.step}: only the folder of a run has steps. Name such a folder, or remove --step."
            )
        if run is not None and (args.answers or args.data):
            raise ConfigError(f"{run} already has answers. Remove --data and --answers, or name a run file.")
        if args.probes < 0:
            raise ConfigError(f"--probes {args.probes}: the number of rows must be at least 0.")
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load, look_for_models
        from rlhf_runtime.config.runfile import RunFile
        from rlhf_runtime.report.recorded_samples import samples_file

        flags = overrides(args, {"data": "data.eval"})
        reward_flags = [
            flag for flag in flags if run is not None and args.reward and flag[0].partition(".")[0] == "reward"
        ]
        path = args.run_file if run is None else str(run / "config.toml")
        config = load(path, [flag for flag in flags if flag not in reward_flags], algorithm="score")
        if run is not None:
            data = config.data.model_copy(update={"eval": config.data.train})
            # The samples exist already: a rollout of episodes would ask for the environment.
            rollout = RunFile.model_fields["rollout"].default
            config = config.model_copy(update={"data": data, "env": None, "rollout": rollout})
        if reward_flags:  # they replace the run's rewards, whose options do not apply to them
            config = config.model_copy(update={"reward": load(None, reward_flags, algorithm="score").reward})
        if not config.data.eval:
            raise ConfigError("no data is named. Set --data FILE, or name the folder of a run.")
        if not config.reward:
            raise ConfigError("no reward is named: there is nothing to try. Set --reward NAME.")
        # Before the imports below, which take seconds.
        look_for_models(config)
        from rlhf_cli.rewards.trial import try_rewards
        from rlhf_cli.rewards.trial_tables import as_page, as_text, sections

        file = None if run is None else samples_file(run, args.step)[0]
        trial = try_rewards(config, Plugins.discover(), args.answers, file, args.probes, note=note)
        title = f"{', '.join(trial.rewards)} on {file or ', '.join(source.path for source in config.data.eval)}"
        parts = sections(trial)
        sys.stdout.write(as_text(parts))
        if args.html is not None:
            args.html.write_text(as_page(title, parts), encoding="utf-8")
            sys.stdout.write(f"\n{args.html}: the same, with whole texts\n")
        return 0


class RewardsCommand(CommandGroup):
    """Check rewards before a run uses them."""

    name = "rewards"
    actions = (RewardsTryCommand,)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [RewardsCommand]
