"""Write an adapter into its base model."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument


class MergeCommand(Command):
    """Merge an adapter in PEFT format into its base: `rlhf merge ADAPTER FOLDER`.

    ADAPTER is a folder with adapter_config.json, such as model/adapter of a run with --trainer.lora.rank. Language
    models, reward models and critics are merged. FOLDER becomes a whole model. It must compute what base and adapter
    compute together before it gets its name.
    """

    name = "merge"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("adapter", type=path_argument, metavar="ADAPTER", help="folder of the adapter")
        parser.add_argument("folder", type=path_argument, metavar="FOLDER", help="new folder for the model")
        parser.add_argument(
            "--base", metavar="BASE", help="folder or hub name of the base, if not the one that ADAPTER names"
        )
        parser.add_argument(
            "--dtype", choices=("fp32", "bf16"), help="number format of the new weights; default: that of the base"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.jobs.merging import merge

        folder: Path = args.folder
        model = merge(args.adapter, folder, args.base, args.dtype)
        sys.stdout.write(
            f"{folder}: {model.architecture} in {model.dtype}. Its {model.outputs} are those of {args.adapter} on "
            f"{model.base} to within {model.difference:.1e}.\n"
        )
        if model.generates:
            sys.stdout.write(f"next: rlhf chat {shlex.quote(str(folder))}\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [MergeCommand]
