"""Chat with a model, or with two side by side."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import dotted

if TYPE_CHECKING:
    from rlhf_runtime.jobs.inference import Conversation

COMMANDS = {"/reset": "forgets the conversation", "/template": "shows the last input of the model", "/quit": "ends"}
WIDE = 100
"""Width of a terminal, in columns, from which two answers are shown side by side."""


class ChatCommand(Command):
    """Chat with a model: `rlhf chat MODEL_OR_RUN`, or with two at once: `rlhf chat RUN BASE`.

    /reset forgets the conversation, /template shows the model's last input, /quit ends. Each line of a pipe is
    answered in one line, in which line breaks are written as \\n. Dotted flags of the run file work too, for example
    --policy.dtype fp32.
    """

    name = "chat"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL_OR_RUN", help="a model: a folder or a hub name; or a run")
        parser.add_argument("other", nargs="?", metavar="OTHER", help="a second model, which gets the same messages")
        parser.add_argument("--system", metavar="TEXT", help="system message; default: the run's")
        parser.add_argument(
            "--temperature", default="0", metavar="T", help="0 (default): greedy, the most likely token"
        )
        parser.add_argument("--max-tokens", default="512", metavar="N", help="longest answer in tokens (default: 512)")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.jobs.inference import conversation

        common = [("eval.temperature", args.temperature), ("sampling.max_new_tokens", args.max_tokens)]
        models = [args.model] if args.other is None else [args.model, args.other]
        flags = [[*model_flags(model, args.system), *common, *dotted(args.overrides)] for model in models]
        with ExitStack() as resources:
            talks = {
                name: resources.enter_context(conversation(options))
                for name, options in zip(labels(models), flags, strict=True)
            }
            Terminal(talks).talk()
        return 0


def model_flags(model: str, system: str | None) -> list[tuple[str, str | None]]:
    """Flags of the run file for a model, or for the model of a run with the run's system message and template.

    Raises ConfigError if the run has no model yet.
    """
    from rlhf.errors import ConfigError
    from rlhf_runtime.report.run_record import read_config

    folder = Path(model).expanduser()
    flags: list[tuple[str, str | None]] = [] if system is None else [("data.system", system)]
    if not (folder / "config.toml").is_file():
        return [("policy.model", model), *flags]
    if not (folder / "model").is_dir():
        raise ConfigError(
            f"the run {folder} has not written a model yet: there is no {folder / 'model'}. Export the model of a "
            f"checkpoint (rlhf export {folder} --step N -o FOLDER), and name that folder."
        )
    config = read_config(folder / "config.toml")
    data = config.get("data", {})
    names = ("template",) if system is not None else ("system", "template")
    flags += [(f"data.{name}", data[name]) for name in names if name in data]
    for name, value in data.get("template_kwargs", {}).items():
        flags.append((f"data.template_kwargs.{name}", value if isinstance(value, str) else json.dumps(value)))
    if config.get("policy", {}).get("trust_remote_code"):
        flags.append(("policy.trust_remote_code", "true"))
    return [("policy.model", str(folder / "model")), *flags]


def labels(models: Sequence[str]) -> list[str]:
    """The last parts of the models' names; if these are equal, the whole names."""
    short = [Path(model).name for model in models]
    return short if len({*short}) == len(short) else [f"{number}: {m}" for number, m in enumerate(models, 1)]


class Terminal:
    """Reads messages, and shows the answers while they are generated."""

    def __init__(self, talks: dict[str, Conversation]) -> None:
        self._talks = talks
        self._people = sys.stdin.isatty()

    def talk(self) -> None:
        """Chat until /quit, or the end of the input."""
        if self._people:
            _write(f"{', '.join(f'{name} {text}' for name, text in COMMANDS.items())}\n")
        while (line := self._line()) is not None and line != "/quit":
            if line == "/reset":
                for talk in self._talks.values():
                    talk.reset()
            elif line == "/template":
                self._show_prompts()
            elif line.startswith("/") and " " not in line:
                _write(f"unknown command {line}; allowed: {', '.join(COMMANDS)}\n")
            elif line:
                self._answer(line)

    def _line(self) -> str | None:
        """The next line; None at the end of the input."""
        if not self._people:
            line = sys.stdin.readline()
            return line.strip() if line else None
        with suppress(ImportError):
            import readline  # noqa: F401 (gives input() editing and a history)
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return None

    def _show_prompts(self) -> None:
        from rlhf_runtime.observe.sample_lines import printable

        for name, talk in self._talks.items():
            _write(f"{self._head(name)}{printable(talk.prompt) if talk.prompt else 'there is no message yet'}\n")

    def _answer(self, line: str) -> None:
        from rlhf.errors import RlhfError
        from rlhf_runtime.observe.sample_lines import printable

        try:
            if not self._people:
                for name, talk in self._talks.items():
                    _write(f"{self._head(name)}{_one_line(''.join(talk.answer(line)))}\n")
            elif len(self._talks) > 1 and _columns() >= WIDE:
                _write_columns({name: talk.answer(line) for name, talk in self._talks.items()})
            else:
                self._write_one_by_one(line)
        except RlhfError as error:
            if not self._people:
                raise
            _write(printable(f"{error}\n"))
        except KeyboardInterrupt:  # ends the answer
            _write("\n")

    def _write_one_by_one(self, line: str) -> None:
        from rlhf_runtime.observe.sample_lines import printable

        for name, talk in self._talks.items():
            _write(self._head(name))
            for piece in talk.answer(line):
                _write(printable(piece))
            _write("\n")

    def _head(self, name: str) -> str:
        if len(self._talks) == 1:
            return ""
        return f"{name}:\n" if self._people else f"{name}\t"


def _write_columns(answers: dict[str, Iterator[str]]) -> None:
    """Write two answers in two columns, alternating between them."""
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text
    from rlhf_runtime.observe.sample_lines import printable

    texts = {name: Text() for name in answers}

    def table() -> Table:
        grid = Table(box=None, expand=True, padding=(0, 2, 0, 0))
        for name in texts:
            grid.add_column(name, ratio=1, overflow="fold")
        grid.add_row(*texts.values())
        return grid

    with Live(table(), refresh_per_second=8, vertical_overflow="visible") as live:
        for pieces in zip_longest(*answers.values(), fillvalue=""):
            for text, piece in zip(texts.values(), pieces, strict=True):
                text.append(printable(piece))
            live.update(table())


def _one_line(text: str) -> str:
    from rlhf_runtime.observe.sample_lines import printable

    return printable(text).replace("\\", "\\\\").replace("\n", "\\n")


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ChatCommand]
