"""Sample answers from a model."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_input import OF_A_RUN

if TYPE_CHECKING:
    from rlhf.types import Trajectory


class GenerateCommand(Command):
    """Sample answers: `rlhf generate --model PATH --prompt "47+38="`, or `--data FILE` for many.

    Each token is the most likely one; `--eval.temperature 0.7` samples tokens instead, and `--eval.samples 4` samples
    four answers to each prompt. `--sampling.max_new_tokens 64` limits their length. `--save FILE.jsonl` writes every
    answer with its tokens and log-probs.
    """

    name = "generate"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(
            parser,
            (*OF_A_RUN, "reward"),
            {"model": "model that answers: a folder or a hub name", "data": "rows to answer"},
        )
        parser.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
        parser.add_argument(
            "--save", type=path_argument, metavar="FILE.jsonl", help="write every answer with its tokens to this file"
        )

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import ConfigError

        from rlhf_cli.jobs.run_files import check_folder, load_for_answers

        check_folder(args.save)
        if bool(args.prompt) == bool(args.data):
            raise ConfigError("give the prompts either as --prompt TEXT (repeated for several) or as --data FILE")
        if args.prompt and not all(args.prompt):
            raise ConfigError("--prompt is empty; an answer needs at least one token before it")
        flags = overrides(args, {"data": "data.eval"})
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "prompts.jsonl"
            config, plugins = load_for_answers(args.run_file, flags, False, file if args.prompt else None)
            if args.prompt:
                column = _column(config.data.input_template)
                file.write_text("".join(json.dumps({column: text}) + "\n" for text in args.prompt))
            from rlhf_runtime.jobs.inference import evaluate_model
            from rlhf_runtime.observe.sample_lines import printable

            groups, prompt_of = evaluate_model(config, plugins, save=args.save)[1:]
        for group in groups:
            for trajectory in group.trajectories:
                if trajectory.status == "failed":
                    raise ConfigError(f"row {group.row.index}: {trajectory.error}")
                text = conversation_text(prompt_of(trajectory), trajectory)
                sys.stdout.write(f"{printable(text) if sys.stdout.isatty() else text}\n")
        return 0


def _column(template: str | None) -> str:
    """The column of a prompt's text: the one that ``data.input_template`` names."""
    if template is None:
        return "prompt"
    from rlhf.errors import ConfigError
    from rlhf_runtime.data.input_template import template_columns

    column, *other_columns = template_columns(template)
    if other_columns or re.search(rf"{{{column}[.\[]", template):
        raise ConfigError(
            f"--prompt is one text, but data.input_template = {template!r} makes the prompt of several values. Set "
            "--data FILE with its columns, or --data.input_template '{prompt}'."
        )
    return column


def conversation_text(prompt: str | Sequence[Mapping[str, Any]] | None, trajectory: Trajectory) -> str:
    """Prompt and answer. For a chat, each message follows its role, as in `rlhf samples`: decoded without special
    tokens, the messages would run together."""
    from rlhf_runtime.data.messages import text_of

    turns = trajectory.turns
    if isinstance(prompt, str) or (prompt is None and not turns[0].messages):
        return f"{trajectory.prompt_text}{trajectory.completion}"
    messages = [(message.get("role", "?"), text_of(message.get("content") or "")) for message in prompt or ()]
    for turn in turns[1:] if prompt else turns:
        messages += [("assistant", turn.text)] if turn.sampled else turn.messages
    return "\n".join(f"[{role}] {text}" for role, text in messages)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [GenerateCommand]
