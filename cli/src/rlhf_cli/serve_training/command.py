"""Serve a policy to clients of the Tinker protocol."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import OF_A_RUN
from rlhf_cli.command_output import say
from rlhf_cli.serve_reward.access import Access, add_access

ADAPTERS = (("trainer.lora.rank", "32"), ("trainer.lora.alpha", "32"))
"""Defaults of the protocol."""


class ServeTrainingCommand(Command):
    """Let clients train a model: `rlhf serve-training --model MODEL`. Programs for Tinker (`pip install tinker`) run
    against it with TINKER_BASE_URL set to its address.

    Each client trains an adapter of its own. The server listens on this machine only, unless --host says otherwise;
    then it needs a token (--token-env), which clients send as TINKER_API_KEY.
    """

    name = "serve_training"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser, excluded_flags=(*OF_A_RUN, "data", "reward"))
        parser.add_argument("--name", help="name of the base model for clients (default: that of --model)")
        parser.add_argument("--checkpoints", default="runs/served", metavar="FOLDER", help="default: %(default)s")
        add_access(parser, port=8100)

        parser.add_argument(
            "--export", nargs=2, metavar=("CHECKPOINT", "FOLDER"), help="export the model of tinker://... and exit"
        )

    def run(self, args: argparse.Namespace) -> int:
        if importlib.util.find_spec("tinker") is None:
            raise ConfigError("the protocol needs the package tinker: pip install 'rlhf-cli[tinker]'")
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load
        from rlhf_runtime.jobs.training import place_policy

        from rlhf_cli.serve_training.serving import export, serve

        access = Access.checked(args.host, args.port, args.token_env)
        flags = overrides(args)
        if args.run_file is None and not any(name.startswith("trainer.lora") for name, _ in flags):
            flags = [*ADAPTERS, *flags]
        config = load(args.run_file, flags, algorithm="serve_training")
        access.hide()
        plugins_of_run = place_policy(config, Plugins.discover())
        name, folder = args.name or str(config.policy.model), Path(args.checkpoints)
        if args.export is not None:
            export(plugins_of_run, name, folder, args.export[0], Path(args.export[1]))
            say(f"the model of {args.export[0]} is in {args.export[1]}")
        else:
            serve(plugins_of_run, access, name, folder, announce=say)
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ServeTrainingCommand]
