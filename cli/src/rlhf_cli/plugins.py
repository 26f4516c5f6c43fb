"""List, show, check, create and isolate plugins."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rlhf import hookimpl
from rlhf.errors import ConfigError, PluginError, PluginNotFound, RlhfError, did_you_mean
from rlhf.interfaces import Command
from rlhf.paths import path_argument
from rlhf.plugins import Entry, Plugins, Resolved, parse_reference
from rlhf.plugins.entry import KINDS, distribution_of

from rlhf_cli.command_group import CommandGroup
from rlhf_cli.command_output import say
from rlhf_cli.scaffold import LIKE, write_plugin

SECTIONS = {"env": "[env]", "reward": "[[reward]]", "rollout": "[rollout]"}
"""{kind with the option ``python``: its section}. Only some rollouts have the option."""


# -------------------------------------------------------------------------------------------- list


class PluginsListCommand(Command):
    """List what is installed, from metadata alone: nothing is imported."""

    name = "list"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("kind", nargs="?", metavar="KIND", help=f"only this kind: {', '.join(KINDS)}")
        parser.add_argument("--json", action="store_true", help="one JSON list of objects")
        parser.add_argument(
            "--check", action="store_true", help="import each plugin and report errors; exit 1 if there are any"
        )

    def run(self, args: argparse.Namespace) -> int:
        plugins = Plugins.discover()
        entries = plugins.list(args.kind)
        statuses = [_import_status(plugins, e) if args.check else e.status for e in entries]
        rows = [
            {"kind": e.kind, "name": e.name, "distribution": e.distribution, "version": e.version, "status": status}
            for e, status in zip(entries, statuses, strict=True)
        ]
        if args.json:
            say(json.dumps(rows, indent=2))
        else:
            say(_table(["kind", "name", "distribution", "version", "status"], rows))
        return 1 if args.check and any(status != "ok" for status in statuses) else 0


def _import_status(plugins: Plugins, entry: Entry) -> str:
    if entry.status != "ok":
        return entry.status
    try:
        plugins.resolve(entry.kind, f"{entry.distribution}/{entry.name}")
    except RlhfError as error:
        return str(error).removeprefix(str(entry)).lstrip(": ")
    return "ok"


def _table(columns: list[str], rows: list[dict[str, str]]) -> str:
    widths = [max(len(c), *(len(r[c]) for r in rows)) if rows else len(c) for c in columns]
    lines = [[c.upper() for c in columns], *([r[c] for c in columns] for r in rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


# -------------------------------------------------------------------------------------------- show


class PluginsShowCommand(Command):
    """Show a plugin: its options, its needs or capabilities, its source."""

    name = "show"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="a name or any other reference, e.g. file:reward.py")
        parser.add_argument("--kind", help="needed if several kinds have a plugin of this name")
        parser.add_argument("--json", action="store_true", help="one JSON list of objects")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_cli.describe import as_text, describe

        plugins = Plugins.discover()
        descriptions = [describe(resolved, plugins) for resolved in _resolve_all(plugins, args.name, args.kind)]
        say(json.dumps(descriptions, indent=2) if args.json else "\n\n".join(map(as_text, descriptions)))
        return 0


def _resolve_all(plugins: Plugins, ref: str, kind: str | None) -> list[Resolved]:
    """The plugin of that kind, or the plugins of all kinds with this name."""
    if kind is not None:
        return [plugins.resolve(kind, ref)]
    if ref.startswith(("file:", "python:", "model:", "http:", "https:")):
        raise PluginNotFound(f"{ref!r} could be of any kind: add --kind, e.g. --kind reward")
    parts = [f"{e.name} (--kind {e.kind})" for e in plugins.list() if e.distribution == ref]
    if parts:
        raise PluginNotFound(f"{ref!r} is a distribution. Name one of its plugins: {', '.join(parts)}")
    reference = parse_reference(KINDS[0], ref)
    kinds = list(dict.fromkeys(e.kind for e in plugins.list() if e.name == reference.name and e.kind in KINDS))
    if not kinds:
        names = sorted({e.name for e in plugins.list()})
        raise PluginNotFound(
            f"no plugin named {reference.name!r}.{did_you_mean(reference.name, names)} `rlhf plugins list` shows what "
            f"is installed.{plugins.how_to_install(distribution_of(reference.name))}"
        )
    return [plugins.resolve(k, ref) for k in kinds]


# --------------------------------------------------------------------------------------------- new


class PluginsNewCommand(Command):
    """Write a new plugin: a distribution that installs and passes its own tests."""

    name = "new"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="lower case letters, digits and '_'")
        parser.add_argument("--kind", required=True, help=", ".join(KINDS))
        like = f"starting point of an algorithm: {', '.join(LIKE)} (default: {next(iter(LIKE))})"
        parser.add_argument("--like", help=like)
        parser.add_argument(
            "--output", type=path_argument, default=Path(), metavar="DIR", help="parent folder (default: here)"
        )

    def run(self, args: argparse.Namespace) -> int:
        folder = write_plugin(args.name, args.kind, args.output, args.like)
        tests = "" if importlib.util.find_spec("pytest") else " pytest"
        commands = [
            f"pip install -e {folder}{tests}",
            f"pytest {folder}",
            f"rlhf plugins show {args.name} --kind {args.kind}",
        ]
        say("\n  ".join([f"wrote {folder}; next:", *commands]))
        installed = {
            f"{e.distribution} {e.version}" for e in Plugins.discover().list() if e.distribution == folder.name
        }
        for name in installed:
            sys.stderr.write(
                f"note: {name} is installed: installing the new one replaces it. Another name keeps both\n"
            )
        return 0


# ----------------------------------------------------------------------------------------- isolate


class PluginsIsolateCommand(Command):
    """Create a virtual environment with the packages of one plugin."""

    name = "isolate"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="a name or any other reference, e.g. file:env.py")
        parser.add_argument("--kind", help="needed if several kinds have a plugin of this name")
        parser.add_argument("--output", type=path_argument, required=True, metavar="DIR", help="new folder")
        parser.add_argument(
            "--python", default=sys.executable, metavar="PROGRAM", help="Python 3.11 or newer (default: that of rlhf)"
        )
        parser.add_argument(
            "--with",
            dest="packages",
            action="append",
            default=[],
            metavar="REQUIREMENT",
            help="install this too, e.g. --with 'heavy==1.2'; may be given several times",
        )

    def run(self, args: argparse.Namespace) -> int:
        matches = _resolve_all(Plugins.discover(), args.name, args.kind)
        if len(matches) > 1:
            raise ConfigError(
                f"there are plugins {args.name!r} of the kinds {', '.join(r.kind for r in matches)}: add --kind"
            )
        say(isolate(matches[0], args.output, args.python, args.packages))
        return 0


def isolate(resolved: Resolved, folder: Path, python: str, packages: list[str]) -> str:
    """Create the virtual environment and install in it ``packages`` and the requirements of the plugin and the core.
    Returns the lines for the run file. After a failure the folder is removed.

    Raises ConfigError: the plugin is of another kind, or the folder exists. PluginError: Python or pip failed.
    """
    from rlhf_runtime.calls.isolation import environment, to_install

    is_isolated = resolved.kind in SECTIONS
    if resolved.kind == "rollout":
        is_isolated = "python" in resolved.cls.Config.model_fields
    if not is_isolated:
        allowed = "env, reward, and rollouts that have the option python"
        raise ConfigError(f"{resolved} cannot run in its own Python environment; allowed kinds: {allowed}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a new folder with --output, or remove it")
    requirements = to_install(resolved) + packages
    made_python = folder / "bin" / "python"
    # Without PYTHONPATH, as in a worker: pip would treat packages there as installed.
    variables = environment(str(made_python), os.environ)
    try:
        _call([python, "-m", "venv", str(folder)], variables)
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([str(made_python), *pip, *requirements], variables)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    headline = f"created {folder} with {', '.join(requirements)}; add to the run file:"
    return f'{headline}\n\n{SECTIONS[resolved.kind]}\nuse = "{resolved.ref}"\npython = "{made_python}"'


def _call(command: list[str], variables: dict[str, str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        raise ConfigError(f"--python {command[0]} cannot be started: {error.strerror}") from None
    if process.returncode != 0:
        last = "\n  ".join((process.stderr or process.stdout).strip().splitlines()[-8:])
        raise PluginError(f"`{' '.join(command)}` failed:\n  {last}")


# ------------------------------------------------------------------------------------------- check


class PluginsCheckCommand(Command):
    """Run the conformance suite of the plugin's kind."""

    name = "check"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", metavar="NAME", help="a name or any other reference, e.g. file:reward.py")
        parser.add_argument("--kind", help="needed if several kinds have a plugin of this name")
        parser.add_argument(
            "-k", dest="only", default="", metavar="CHECK", help="only the checks whose names contain this"
        )
        parser.add_argument("--json", action="store_true", help="one JSON list of objects")

    def run(self, args: argparse.Namespace) -> int:
        from rlhf_testing import conformance

        plugins = Plugins.discover()
        rows: list[dict[str, Any]] = []
        selected = _resolve_all(plugins, args.name, args.kind)
        _refuse_unknown_check(args.only, [resolved.kind for resolved in selected])
        for resolved in selected:
            first_names: dict[str, str] = {}

            def report(
                result: conformance.CheckResult,
                resolved: Resolved = resolved,
                first_names: dict[str, str] = first_names,
            ) -> None:
                rows.append({"kind": resolved.kind, "name": resolved.name} | _row(result))
                if not args.json:
                    first = first_names.setdefault(result.detail, result.name)
                    new = first == result.name or (result.passed and not result.skipped)
                    detail = result.detail if new else f"Same reason as {first}."
                    say(f"{rows[-1]['outcome'].ljust(8)}  {resolved.kind} {resolved.name}: {result.name}: {detail}")

            # Output of a plugin must not be in the JSON.
            with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
                conformance.run(resolved, report, args.only)
        counts = Counter(row["outcome"] for row in rows)
        if args.json:
            say(json.dumps(rows, indent=2))
        else:
            summary = f"{counts['ok']} passed, {counts['FAILED']} failed, {counts['left out']} left out"
            say(f"{len(rows)} checks: {summary}.")
        return 1 if counts["FAILED"] or not rows else 0


def _refuse_unknown_check(text: str, kinds: list[str]) -> None:
    """Raises ConfigError if no check of these kinds has ``text`` in its name."""
    from rlhf_testing.conformance import check_names

    names = list(dict.fromkeys(name for kind in kinds for name in check_names(kind)))
    if not any(text in name for name in names):
        raise ConfigError(
            f"-k {text}: no check of kind {' or '.join(kinds)} has this in its name.{did_you_mean(text, names)} "
            f"The checks are {', '.join(names)}"
        )


def _row(result: Any) -> dict[str, str]:
    outcome = "left out" if result.skipped else "ok" if result.passed else "FAILED"
    return {"check": result.name, "outcome": outcome, "detail": result.detail}


class PluginsCommand(CommandGroup):
    """List, show, check, create and isolate plugins."""

    name = "plugins"
    actions = (PluginsListCommand, PluginsShowCommand, PluginsNewCommand, PluginsCheckCommand, PluginsIsolateCommand)


@hookimpl
def rlhf_register_command() -> list[type[Command]]:
    return [PluginsCommand]
