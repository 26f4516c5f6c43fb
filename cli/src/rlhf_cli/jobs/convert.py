"""Convert a GGUF file or a folder of .bin weights."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument

from rlhf_cli.command_output import note


class ConvertCommand(Command):
    """Convert a model in another format: `rlhf convert MODEL.gguf FOLDER`, or `rlhf convert BIN_FOLDER FOLDER`.

    SOURCE is a GGUF file, or a folder with pickled weights (pytorch_model.bin). FOLDER becomes a folder with
    safetensors, config, tokenizer, chat template and generation config. It is loaded and compared with SOURCE before it
    gets its name. Quantised weights are written as the numbers that they stand for.
    """

    name = "convert"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "source", type=path_argument, metavar="SOURCE", help="GGUF file, or folder with .bin weights"
        )
        parser.add_argument("folder", type=path_argument, metavar="FOLDER", help="new folder for the model")
        parser.add_argument(
            "--dtype",
            choices=("fp32", "bf16"),
            default="fp32",
            help="number format of the weights: fp32 (default) holds every value of SOURCE exactly; bf16 takes half "
            "the space, and rounds",
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.jobs.conversion import convert

        folder: Path = args.folder
        model = convert(args.source, folder, args.dtype, note)
        sys.stdout.write(
            f"{folder}: {model.architecture}, {model.parameters / 1e6:,.1f} M parameters in {args.dtype}, "
            f"{model.bytes / 1e9:.2f} GB, {model.texts}. It gives the same {model.outputs} as {args.source}.\n"
        )
        if model.generates:
            place = shlex.quote(str(folder))
            sys.stdout.write(f"next: rlhf generate --model {place} --prompt 'What is the capital of France?'\n")
        return 0


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ConvertCommand]
