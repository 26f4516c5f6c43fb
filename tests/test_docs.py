"""The documentation is true: code runs, generated pages equal the code, commands, flags, files and links exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import pytest
from rlhf.config import short_flags
from rlhf.flags import item_of, model_of
from rlhf.plugins import Plugins
from rlhf.runfile import LISTS, SINGLE, RunFile
from rlhf_cli.describe import options
from rlhf_cli.main import COMMANDS, split_dotted

from tests.pages import DOCS, ROOT, anchors, blocks, commands, links, name_of, pages, prose, read

every_page = pytest.mark.parametrize("page", pages(), ids=name_of)

OWN_FLAGS = {"help", "version", "traceback", "dry-run", "json", "check", "kind", "output", "prompt", "save"}
"""Flags of commands besides those of the run file."""

# ----------------------------------------------------------------------------------------- executed

PIP = """#!{bash}
# Stands for pip, offline: installs into a folder of the test's and links the sources, as -e does.
set -e
[ "$1 $2" = "install -e" ] || {{ echo "only 'pip install -e FOLDER' is known here, got: $*"; exit 1; }}
{python} -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target "{target}" "./$3"
for package in "$PWD/$3"/src/*/; do
  name=$(basename "$package"); rm -rf "{target}/$name"; ln -s "$PWD/$3/src/$name" "{target}/$name"
done
"""


@pytest.fixture
def shell(tmp_path):
    """Run a shell block in a folder of its own, where ``pip install -e`` needs no network and changes no environment."""
    tools, target, work = tmp_path / "tools", tmp_path / "installed", tmp_path / "work"
    for folder in (tools, target, work):
        folder.mkdir()
    (tools / "pip").write_text(PIP.format(bash="/usr/bin/env bash", python=sys.executable, target=target))
    for tool, module in (("rlhf", "rlhf_cli.main"), ("pytest", "pytest"), ("python", "")):
        arguments = f"-m {module}" if module else ""
        (tools / tool).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(target),
        "PYTEST_ADDOPTS": "--import-mode=importlib -p no:cacheprovider",
        "OMP_NUM_THREADS": "1",
    }

    def run(text: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", text], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run.folder = work
    return run


def execute(page: Path, shell) -> None:
    """Files are written, shell blocks run, and each line of a ``text`` block is in what the last command printed."""
    output = ""
    for block in blocks(page):
        if block.file:
            path = shell.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "sh":
            output = shell(block.text)
        elif block.language == "text":
            missing = [line for line in block.text.splitlines() if line not in output]
            assert not missing, f"{missing} is not in the output:\n{output}"


@pytest.mark.slow
def test_writing_a_plugin_works_from_the_first_line_to_the_last(shell):
    execute(DOCS / "writing-a-plugin.md", shell)
    assert "QuantileAdvantage" in shell("rlhf plugins show quantile")
    done = subprocess.run  # the page's own promise: a mistyped option is found before a model is loaded
    assert done
