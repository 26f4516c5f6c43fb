"""Serve rewards and reward models over HTTP."""

from __future__ import annotations

import argparse
import math

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import OF_A_RUN, positive
from rlhf_cli.command_output import say
from rlhf_cli.serve_reward.access import Access, add_access


class ServeRewardCommand(Command):
    """Serve rewards over HTTP: `rlhf serve-reward --reward math`, `--reward model:PATH`, or those of a run file.

    The protocol is that of OpenRLHF's remote reward models, which the reward `http` speaks. The server listens on this
    machine only, unless --host says otherwise; then it needs a token (--token-env).
    """

    name = "serve_reward"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser, excluded_flags=(*OF_A_RUN, "data", "model"))
        parser.add_argument(
            "--model",
            metavar="MODEL",
            help="model whose tokenizer is used (default: that of a reward's model); rewards that read only text need "
            "none",
        )
        add_access(parser, port=5000)
        parser.add_argument(
            "--label", metavar="COLUMN", help="column of the row that gets the label (default: both label and answer)"
        )
        for name, metavar, default, text in (
            ("batch", "N", 256, "largest number of samples that a model reads at once"),
            ("queue", "N", 4096, "largest number of samples being processed; further requests get status 429"),
            ("max-mb", "MIB", 64, "largest request; a larger one gets status 413"),
        ):
            parser.add_argument(
                f"--{name}", type=positive, metavar=metavar, default=default, help=f"{text} (default: %(default)s)"
            )
        parser.add_argument(
            "--wait", type=_seconds, metavar="SECONDS", default=0.005,
            help="time that a model waits for more samples to batch (default: %(default)s)",
        )  # fmt: skip
        parser.add_argument(
            "--timeout", type=_seconds, metavar="SECONDS", default=120.0,
            help="time limit of a request, after which it gets status 503 (default: %(default)s)",
        )  # fmt: skip

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load, look_for_models

        from rlhf_cli.serve_reward.application import RequestLimits
        from rlhf_cli.serve_reward.serving import serve

        access = Access.checked(args.host, args.port, args.token_env)
        if args.timeout == 0:
            raise ConfigError("--timeout 0: no request could be answered. Give a positive number of seconds.")
        flags = overrides(args)
        config = load(args.run_file, flags, algorithm="score")
        if not config.reward:
            raise ConfigError("no reward is named: there is nothing to serve. Set --reward plugin:NAME.")
        look_for_models(config)
        limits = RequestLimits(args.max_mb * 2**20, args.queue, args.timeout, args.batch, args.wait)
        serve(config, Plugins.discover(), access, limits, args.label, announce=say)
        return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ServeRewardCommand]
