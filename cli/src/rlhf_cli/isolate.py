"""``rlhf plugins isolate``: a virtual environment with the packages of one plugin."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlhf.errors import ConfigError, PluginError
from rlhf.paths import path_argument
from rlhf.plugins import Resolved

SECTIONS = {"env": "[env]", "reward": "[[reward]]", "rollout": "[rollout]"}
"""{kind with the option ``python``: its section}. Only some rollouts have the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a name or any other reference, e.g. file:env.py")
    parser.add_argument("--kind", help="where several kinds have the name")
    parser.add_argument(
        "--output", type=path_argument, required=True, metavar="DIR", help="folder to make; it must not exist"
    )
    parser.add_argument(
        "--python", default=sys.executable, metavar="PROGRAM", help="Python 3.11 or newer (default: that of rlhf)"
    )
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        default=[],
        metavar="REQUIREMENT",
        help="install this too, e.g. --with 'heavy==1.2'; may be repeated",
    )


def isolate(resolved: Resolved, folder: Path, python: str, packages: list[str]) -> str:
    """Make the virtual environment and install there what the plugin and the core need, and ``packages``. Returns what
    to write into the run file. After a failure the folder is removed.

    Raises ConfigError: the plugin is of another kind, or the folder exists. PluginError: Python or pip failed.
    """
    from rlhf_runtime.workers.isolation import environment, to_install

    own = resolved.kind in SECTIONS
    if resolved.kind == "rollout":
        own = "python" in resolved.cls.Config.model_fields
    if not own:
        allowed = "env, reward, and rollouts that have the option python"
        raise ConfigError(f"{resolved} cannot run under a Python of its own; allowed kinds: {allowed}")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a new folder with --output, or remove it")
    requirements = to_install(resolved) + packages
    made_python = folder / "bin" / "python"
    # Without PYTHONPATH, as in a worker: pip would take packages there for installed.
    variables = environment(str(made_python), os.environ)
    try:
        _call([python, "-m", "venv", str(folder)], variables)
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([str(made_python), *pip, *requirements], variables)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    headline = f"made {folder} with {', '.join(requirements)}; in the run file:"
    return f'{headline}\n\n{SECTIONS[resolved.kind]}\nuse = "{resolved.ref}"\npython = "{made_python}"'


def _call(command: list[str], variables: dict[str, str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    except OSError as error:
        raise ConfigError(f"--python {command[0]} cannot be started: {error.strerror}") from None
    if process.returncode != 0:
        last = "\n  ".join((process.stderr or process.stdout).strip().splitlines()[-8:])
        raise PluginError(f"`{' '.join(command)}` failed:\n  {last}")
