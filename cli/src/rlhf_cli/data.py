"""Show rows as the model will see them; turn recorded samples into data."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf import hookimpl
from rlhf.errors import ConfigError
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf_runtime.config.command_line import add_run_file, overrides
from rlhf_runtime.observe.sample_lines import printable

from rlhf_cli.command_group import CommandGroup
from rlhf_cli.command_input import natural
from rlhf_cli.command_output import require_new_file

if TYPE_CHECKING:
    from rlhf_runtime.config.data_section import DataSection

LONG = 600
"""Largest number of tokens of a sequence that is shown without ``--json``. For a longer sequence, only its start and
its end are shown."""


class DataPreviewCommand(Command):
    """Show rows as the model will see them: `rlhf data preview run.toml`, or `--algo NAME --model PATH --data FILE`.

    The run file and flags are those of `rlhf train`. The tokenizer is loaded, but no model. The first rows of every
    source are shown in the order of the file: the trained tokens, the ends of steps, the rows that would be refused or
    left out, and why. The exit code is 1 if a row is refused; with --check every row counts.
    """

    name = "preview"
    run_file_flags = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_run_file(parser)
        parser.add_argument("--rows", type=natural, default=3, metavar="N", help="rows of each source (default: 3)")
        parser.add_argument("--check", action="store_true", help="tokenise every row and count used and unused rows")
        parser.add_argument("--json", action="store_true", help="one JSON object, with all tokens")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_runtime.config.load import load, look_for_models

        config = load(args.run_file, overrides(args))
        if config.policy.model is None:
            raise ConfigError(
                "no model is named, but the model's tokenizer is needed. Set --model PATH (a folder or a hub name)."
            )
        # Before the imports below, which take seconds.
        look_for_models(config)
        from rlhf.plugins import Plugins
        from rlhf_runtime.checks.sections import ignored_fields
        from rlhf_runtime.config.components import build_algorithm, select
        from rlhf_runtime.config.problems import raise_problems
        from rlhf_runtime.data.dataset import TrainData
        from rlhf_runtime.data.image_tokens import image_tokens
        from rlhf_runtime.data.preview import preview, survey
        from rlhf_runtime.data.tokenizer import load_tokenizer

        plugins = Plugins.discover()
        algorithm = build_algorithm(plugins, config.algorithm, config.origins)
        form, answered = algorithm.data, algorithm.needs().answered
        raise_problems(
            "a run with this file is refused", ignored_fields(config.data, form, algorithm.name, bool(answered))
        )
        tokenizer = load_tokenizer(config.policy.model, config.policy.trust_remote_code)
        images = image_tokens(config.policy.model, config.policy.trust_remote_code)
        data = TrainData(config.data, tokenizer, form, config.run.seed, answers=answered, images=images)
        tools: Sequence[Mapping[str, Any]] = ()
        if form == "prompts":
            rollout = select(plugins, "rollout", config.rollout, "rollout", config.origins).build()
            data.template.shows_tools = not rollout.needs_messages
            tools = rollout.tools()
        report = preview(data, args.rows) | {"tools": list(tools)}
        if args.check:
            report["all"] = survey(data)
        if args.json:
            sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
        else:
            _show(report)
        return 1 if _refused(report, config.data) else 0


def _refused(report: dict[str, Any], section: DataSection) -> bool:
    """Whether a run would refuse one of the examined rows."""
    fatal = [kind for kind in ("too_long", "bad_rows") if getattr(section, kind) == "error"]
    is_refused = any(counts[kind] for counts in report.get("all", {}).values() for kind in fatal)
    return is_refused or any(row["status"] == "refused" for row in report["shown"])


# -------------------------------------------------------------------------------------------- show


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    colour = console.is_terminal and not console.no_color
    console.print(f"{report['form']}, {report['template']} template", style="bold")
    words = "for rewards and environments only" if report["form"] == "prompts" else "not used"
    for source in report["sources"]:
        unused = f"; {words}: {', '.join(c or repr(c) for c in source['unused'])}" if source["unused"] else ""
        line = f"data.{source['use']} {source['name']!r}: {source['rows']} rows, read as {source['layout']}{unused}"
        console.print(Text(printable(line)))
    if report["end_note"]:
        console.print(Text(f"note: {report['end_note']}"))
    if report["tools"]:
        console.print(Text("The rollout also shows these tools, which are not among the tokens below:"))
        console.print(Text(json.dumps(report["tools"], ensure_ascii=False)))
    console.print(_legend(report["form"], report["answers"], colour))
    for row in report["shown"]:
        console.print()
        console.print(_headline(row))
        for sequence in row["sequences"]:
            console.print(_tokens(sequence, colour))
    for use, counts in report.get("all", {}).items():
        if counts["ok"] or counts["named"]:
            console.print()
            console.print(Text(printable("\n".join(_summary(use, counts)))))


def _legend(form: str, answers: bool, colour: bool) -> Any:
    from rich.text import Text

    if form == "prompts" and not answers:
        return Text("Every other token is shaded; the policy answers where the text ends." if colour else
                    "The policy answers where the text ends.")  # fmt: skip
    if not colour:
        steps = ", and the token that ends a step is followed by its label" if form == "steps" else ""
        return Text(f"Trained tokens are in ⟦brackets⟧{steps}.")
    text = Text("Trained on: ")
    text.append("these ", _STYLES[True][0]).append("tokens", _STYLES[True][1]).append("; only read: ")
    text.append("these ", _STYLES[False][0]).append("tokens", _STYLES[False][1])
    if form == "steps":
        text.append("; a step ends here, with its label: ").append("token", _END).append("⟨1⟩", "bold")
    return text


def _headline(row: dict[str, Any]) -> Any:
    from rich.text import Text

    values = "".join(f", {name} {row[name]}" for name in ("label", "margin") if name in row)
    text = Text(printable(f"{row['where']} ({row['use']}){values}"), "bold")
    if row["why"]:
        style = "bold red" if row["status"] == "refused" else "yellow"
        text.append(printable(f"\n{row['status']}: {row['why']}"), style)
    return text


_STYLES = {True: ("black on green", "black on bright_green"), False: ("dim", "dim underline")}
"""{whether trained on: two styles that alternate from token to token, so that tokens can be distinguished}."""
_END = "bold white on blue"


def _tokens(sequence: dict[str, Any], colour: bool) -> Any:
    from rich.text import Text

    counts = f"{sequence['name']}: {sequence['tokens']} tokens"
    if sequence["name"] != "prompt":
        counts += f", {sequence['trained']} trained on"
    if steps := dict(sequence["steps"]):
        counts += f", {len(steps)} steps"
    text = Text().append(counts + "\n", "cyan")
    trained, size = False, len(sequence["texts"])
    positions: list[int | None] = [*range(size)]
    if size > LONG:
        positions[LONG // 2 : size - LONG // 2] = [None]
    for number, index in enumerate(positions):
        if index is None:
            text.append(f" ... {size - LONG} tokens ... ", "yellow")
            continue
        on = sequence["mask"][index]
        if not colour and on != trained:
            text.append("⟦" if on else "⟧")
        trained = on
        end = index in steps
        text.append(printable(sequence["texts"][index]).replace("\n", "↵\n"), _END if end else _STYLES[on][number % 2])
        if end:
            text.append(f"⟨{steps[index]:g}⟩", "bold")
    if trained and not colour:
        text.append("⟧")
    return text


def _summary(use: str, counts: dict[str, Any]) -> Iterator[str]:
    total = counts["ok"] + counts["too_long"] + counts["bad_rows"]
    yield (
        f"data.{use}: {counts['ok']} of {total} rows can be used, {counts['too_long']} are too long, "
        f"{counts['bad_rows']} are bad; the longest has {counts['longest']} tokens"
    )
    yield from (f"  {line}" for line in counts["named"])
    if (unnamed := total - counts["ok"] - len(counts["named"])) > 0:
        yield f"  and {unnamed} more"


FORMS = {
    "pairs": "prompt, chosen, rejected: the best answer to each prompt and the worst, where they differ",
    "best": "prompt, completion, reward: the best answers to each prompt",
    "labels": "prompt, completion, label: every scored answer, labelled true or false by its reward",
    "demonstrations": "prompt, completion: every answer",
    "scored": "prompt, completion, reward: every scored answer",
    "conditional": "prompt with the reward in it, completion, reward: every scored answer, rewards as z-scores",
}
OPTIONS: dict[str, tuple[str, type, str, str]] = {
    "min_gap": ("pairs", float, "GAP", "only where the rewards differ by more than this (default: 0)"),
    "keep": ("best", int, "N", "number of answers to each prompt (default: 1)"),
    "min_reward": ("best", float, "REWARD", "only answers with at least this reward"),
    "threshold": ("labels", float, "REWARD", "answers with at least this reward are labelled true (default: 1)"),
    "condition": (
        "conditional",
        str,
        "TEXT",
        "with {prompt} and {reward} (default: '{prompt} <rm_score>: {reward:.2f} ')",
    ),
}
"""{option: (form that uses it, type, name of its value in the help, help)}."""


class DataExportCommand(Command):
    """Turn recorded samples into data: `rlhf data export runs/latest --form pairs -o pairs.jsonl`.

    Sources are run directories, their rollouts/ folders, and files of `rlhf eval --save`, `generate --save` or `score`.
    """

    name = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "sources", nargs="+", type=path_argument, metavar="SOURCE", help="run directory, its rollouts, or a file"
        )
        forms = "; ".join(f"{name}: {text}" for name, text in FORMS.items())
        parser.add_argument("--form", choices=FORMS, required=True, help=forms)
        parser.add_argument(
            "-o", "--output", type=path_argument, required=True, metavar="FILE.jsonl", help="written as JSON lines"
        )
        parser.add_argument("--force", action="store_true", help="replace the output if it exists")
        parser.add_argument(
            "--truncated", action="store_true", help="include answers that were cut off at their token budget"
        )
        for name, (form, kind, metavar, text) in OPTIONS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=f"{form}: {text}")
        parser.add_argument("--json", action="store_true", help="print the counts as one JSON object")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf.errors import DataError
        from rlhf_runtime.checkpoint.atomic_files import write_atomic
        from rlhf_runtime.checkpoint.json_values import to_text
        from rlhf_runtime.data import export
        from rlhf_runtime.data.recorded_answers import read_answers

        options = _options(args)
        output: Path = args.output
        require_new_file(output, args.force)
        recorded = read_answers(args.sources, truncated=args.truncated)
        left_out = {f"answers {reason}": n for reason, n in recorded.left_out.items()}
        cut = " --truncated includes answers that were cut off." if recorded.left_out.get("cut off") else ""
        try:
            table = getattr(export, args.form)(recorded.groups, **options)
        except DataError as cause:
            listing = _listing(left_out)
            raise DataError(f"{cause}{cut}{listing and f' Left out:{listing}'}") from None
        left_out |= table.left_out
        counts = {"rows": len(table.rows), "prompts": len(recorded.groups), "answers": recorded.answers}
        listing = _listing(left_out)
        if not table.rows:
            raise DataError(
                f"nothing to write: none of the {recorded.answers} answers gives a row.{cut} Left out:{listing}"
            )
        write_atomic(output, "".join(to_text(row) + "\n" for row in table.rows))
        if args.json:
            sys.stdout.write(json.dumps({**counts, "left_out": {w: n for w, n in left_out.items() if n}}) + "\n")
        else:
            totals = f"of {counts['answers']} answers to {counts['prompts']} prompts"
            sys.stdout.write(f"{output}: {len(table.rows)} rows {totals}{'; left out:' + listing if listing else ''}\n")
        return 0


def _listing(left_out: Mapping[str, int]) -> str:
    """A line for each reason with its number; empty if nothing is left out."""
    return "".join(f"\n  {n} {reason}" for reason, n in left_out.items() if n)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the form. An option that the form does not use is an error."""
    options = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    for name in options:
        if OPTIONS[name][0] != args.form:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for --form {OPTIONS[name][0]}; --form {args.form} does not use it")
    if options.get("keep", 1) < 1:
        raise ConfigError(f"--keep must be at least 1, got {options['keep']}")
    if options.get("min_gap", 0.0) < 0:
        raise ConfigError(f"--min-gap must be at least 0, got {options['min_gap']:g}")
    return options


class DataCommand(CommandGroup):
    """Show rows as the model will see them, and turn recorded samples into data."""

    name = "data"
    actions = (DataPreviewCommand, DataExportCommand)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [DataCommand]
