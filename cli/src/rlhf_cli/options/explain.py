"""Options of the run file: type, default, allowed values, meaning, and when they may change."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlhf import hookimpl
from rlhf.interfaces import Command
from rlhf_runtime.config.command_line import add_run_file, overrides

from rlhf_cli.command_output import say

if TYPE_CHECKING:
    from rlhf_cli.options.explained import Explained

WIDTH = 120


class ExplainCommand(Command):
    """Explain options: `rlhf explain` lists the sections of the run file, `rlhf explain trainer` the options of one.
    `rlhf explain trainer.lr` says everything about one option.

    Options of plugins are those of the plugins that the run file and the flags choose, or of the usual ones:
    `rlhf explain trainer --trainer deepspeed`, `rlhf explain algorithm --algo grpo`, `rlhf explain reward run.toml`.
    """

    name = "explain"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "name", nargs="?", metavar="SECTION[.OPTION]", help="a section or an option of the run file"
        )
        add_run_file(parser)
        parser.add_argument("--json", action="store_true", help="one JSON list of objects")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.plugins import Plugins
        from rlhf_runtime.config.load import load
        from rlhf_runtime.config.options import sections

        from rlhf_cli.options.explained import UNNAMED, explained

        if args.name is None:
            rows = [
                {"section": s.path, "heading": s.heading, "plugin": s.default_plugin, "doc": s.doc} for s in sections()
            ]
            say(json.dumps(rows, indent=2) if args.json else _list_of_sections(rows))
            return 0
        flags = overrides(args)
        flags = flags if args.run_file is not None else [("algorithm.use", UNNAMED), *flags]
        explanation = explained(args.name, load(args.run_file, flags), Plugins.discover())
        if args.json:
            say(
                json.dumps(
                    [asdict(e.option) | {"resume": e.resume, "live": e.live} for e in explanation.options], indent=2
                )
            )
        elif explanation.single:
            say(_description(explanation.options[0]))
        else:
            say("\n".join([*explanation.head, *(line for e in explanation.options for line in _short(e))]).lstrip("\n"))
        return 0


def _list_of_sections(rows: Sequence[dict[str, Any]]) -> str:
    width = max(len(row["heading"]) for row in rows)
    lines = []
    for row in rows:
        default = f" Where absent: `{row['plugin']}`." if row["plugin"] else ""
        lines.append(f"{row['heading'].ljust(width)}  {row['doc']}{default}")
    return "\n".join([*lines, "", "`rlhf explain SECTION` lists the options of a section."])


def _short(explained: Explained) -> list[str]:
    """A line with type and default, and the meaning below it."""
    from rlhf_runtime.config.options import default_text

    option = explained.option
    default = default_text(option)
    assignment = "" if not default else f"  {default}" if option.required else f"  = {default}"
    allowed = " May change at a resume." if explained.resume in ("ignore", "report") else ""
    live = " May change while the run trains." if explained.live else ""
    return ["", f"{option.path}: {option.type}{assignment}", *_wrapped(f"{option.doc}{allowed}{live}")]


def _description(explained: Explained) -> str:
    from rlhf_runtime.config.options import default_text

    option = explained.option
    default = default_text(option) or "not set"
    note = f" if [{option.table}] is written" if option.table else ""
    facts = {
        "type": option.type,
        "default": f"{default}{note}",
        "allowed": ", ".join(option.allowed),
        "read by": option.plugin or "the run itself",
        "flag": f"--{option.path} VALUE",
        "resume": RESUME[explained.resume],
        "while running": "an observer may change it" if explained.live else "cannot be changed",
        "installed": ", ".join(explained.names),
    }
    width = max(map(len, facts))
    lines = [f"  {name.ljust(width)}  {text}" for name, text in facts.items() if text]
    return "\n".join([option.path, *_wrapped(option.doc), "", *lines])


RESUME = {
    "ignore": "may differ: it does not change what is computed",
    "report": "may differ; the run says that it continues as a different run",
    "moved": "must be the same, or another path with the same content",
    "refuse": "must be the same",
}
"""{effect of another value on a resume: description}."""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [ExplainCommand]
