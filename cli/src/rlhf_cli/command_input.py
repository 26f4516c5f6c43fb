"""Input of commands: numbers, short flags of a run that they do not accept, answers in the data, the run file of a
run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf_runtime.config.command_line import add_run_file

OF_A_RUN = ("algo", "eval-data", "output", "steps", "resume", "overwrite")
"""Short flags of the run file that a command without a run does not accept."""


def natural(text: str, minimum: int = 0) -> int:
    """The type of a flag whose value is a whole number."""
    if not text.isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {minimum}, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """The type of a flag whose value is a whole number above 0."""
    return natural(text, minimum=1)


def add_dataset_answers(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the flags of a command that scores answers in the data. ``model``: the model whose tokenizer is the
    default."""
    add_run_file(parser, (*OF_A_RUN, "model"), {"data": "rows with the answers"})
    text = f"model whose tokenizer and chat template are used (default: those of {model})"
    parser.add_argument("--model", metavar="MODEL", help=text)
    answers = "column with an answer or a list of them; may be given several times"
    parser.add_argument("--answers", action="append", default=[], metavar="COLUMN", help=answers)


def run_file_of(run: Path) -> str:
    """The run file of the run in a folder. Raises ConfigError if there is none."""
    file = run / "config.toml"
    if not file.is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no config.toml.")
    return str(file)
