"""Output of commands: notes, lines that reach a pipe at once, and new files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.paths import path_argument


def note(text: str) -> None:
    """Write a note to standard error."""
    from rlhf_runtime.observe.sample_lines import printable

    sys.stderr.write(printable(f"note: {text}\n"))


def say(line: str) -> None:
    """Write a line and flush it, so that the reader of a pipe gets it at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def require_new_file(file: Path, force: bool) -> None:
    """Raises ConfigError if the file cannot be written, or exists and may not be replaced."""
    if file.is_dir():
        raise ConfigError(f"--output {file} is a folder. Name a file in a folder that exists.")
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; --force replaces it")
    if not file.parent.is_dir():
        raise ConfigError(f"there is no folder {file.parent} to write {file.name} into")


def add_written_run_file(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a command that writes a run file."""
    help_text = "file to write (default: standard output)"
    parser.add_argument("-o", "--output", dest="file", type=path_argument, metavar="RUN.TOML", help=help_text)
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def write_run_file(file: Path | None, text: str) -> None:
    from rlhf_runtime.checkpoint.atomic_files import write_atomic

    if file is None:
        sys.stdout.write(text)
    else:
        write_atomic(file, text)
        sys.stdout.write(f"wrote {file}; next: rlhf train {file} --dry-run\n")
