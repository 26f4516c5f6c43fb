"""A third-party distribution adds a check of the doctor and a backend.

It is built as a wheel, put on the path, and used through the program ``rlhf``. The examples in the docstrings of the
interfaces of commands, checks and backends are built in the same way.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
from flit_core import buildapi
from rlhf.interfaces import Backend, Check, Command
from rlhf_testing.tiny import tiny_model

from tests.forks import Forks, Place

RLHF = [sys.executable, "-P", str(Path(sys.executable).parent / "rlhf")]

PYPROJECT = """
[build-system]
requires = ["flit_core>=3.11,<5"]
build-backend = "flit_core.buildapi"

[project]
name = "somebodys-plugins"
version = "1.2.3"
description = "A check and a backend."
dependencies = ["rlhf-core>=0.1,<0.2"]

[project.entry-points."rlhf.check"]
weather = "somebodys_plugins"

[project.entry-points."rlhf.backend"]
desk = "somebodys_plugins"

[tool.flit.module]
name = "somebodys_plugins"
"""
SOURCE = '''
"""A check and a backend."""

from rlhf import hookimpl
from rlhf.interfaces import Backend, Check, Finding


def look_outside(argument, report):
    report(argument.upper())


class Weather(Check):
    """Whether it rains."""

    name = "weather"

    def examine(self, examination):
        answer = examination.ask(look_outside, "dry")
        yield Finding("weather", "ok", f"{answer.value} ({examination.launcher or 'no run'})")


class Desk(Backend):
    """This machine."""

    name = "desk"
    launcher = "rlhf-plugin-local/local"
    trainer = "rlhf-plugin-local/torch"
    generator = "rlhf-plugin-local/transformers"


@hookimpl
def rlhf_register_check():
    return [Weather]


@hookimpl
def rlhf_register_backend():
    return [Desk]
'''


def installed(folder: Path, pyproject: str, files: dict[str, str]) -> Path:
    """A folder for the path, with the content of a wheel of these sources."""
    package = tomllib.loads(pyproject)["tool"]["flit"]["module"]["name"]
    source = folder / "source"
    (source / "src" / package).mkdir(parents=True)
    (source / "pyproject.toml").write_text(pyproject)
    for name, text in files.items():
        (source / "src" / package / name).write_text(text.lstrip())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(source)
        wheel = buildapi.build_wheel(str(folder))
    zipfile.ZipFile(folder / wheel).extractall(folder / "site")
    return folder / "site"


def environment(site: Path) -> dict[str, str]:
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}


def rlhf(site: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``rlhf WORDS`` with the distributions in ``site`` in addition to those of this repository."""
    command = [*RLHF, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(site), cwd=cwd)


def in_fork(forks: Forks, site: Path, *words: str, cwd: Path) -> tuple[int, str]:
    """:func:`rlhf` for a command that imports torch. Returns the exit code and the output."""
    process = forks.start(words, place=Place("rlhf", str(cwd), environment(site)))
    return process.wait(), process.output


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("somebody"), PYPROJECT, {"__init__.py": SOURCE})


@pytest.mark.full
def test_a_third_party_check_is_in_the_report_of_the_doctor(site, tmp_path):
    for name in ("torch", "transformers", "vllm", "deepspeed", "ray"):  # so that their checks end at once
        (tmp_path / f"{name}.py").write_text("raise ImportError('left out of this test')")
    path = Path(f"{tmp_path}{os.pathsep}{site}")
    report = json.loads(rlhf(path, "doctor", "--json", cwd=tmp_path).stdout)
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["weather"] == {"name": "weather", "status": "ok", "text": "DRY (no run)", "remedy": ""}


def test_a_run_with_its_backend_trains(site, tmp_path, forks):
    tiny_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    words = ["train", "--algo", "sft", "--model", "model", "--data", "rows.jsonl", "--steps", "1", "--output", "out"]
    code, output = in_fork(forks, site, *words, "--data.batch_size", "2", "--backend", "desk", cwd=tmp_path)
    assert code == 0, output
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert config["launcher"]["use"] == "rlhf-plugin-local/local"
    assert config["trainer"]["use"] == "rlhf-plugin-local/torch"
    code, output = in_fork(forks, site, *words, "--backend", "deck", cwd=tmp_path)
    assert code == 2
    assert output == (
        "rlhf: --backend deck: unknown backend; available: desk, fsdp, local, processes, ray, simulated. Did you "
        "mean 'desk'? Or choose --launcher.use, --trainer.use and --generator.use individually.\n"
    )


# ------------------------------------------------------------------- the examples of the interfaces


def example(interface: type) -> tuple[str, str]:
    """(pyproject.toml, source) from the docstring of an interface. Missing parts are those of the command's example."""
    blocks = re.findall(r"::\n\n((?:    .*\n|\n)+)", inspect.getdoc(interface) + "\n")
    blocks = [textwrap.dedent(block).strip() + "\n" for block in blocks]
    [pyproject] = [block for block in blocks if "entry-points" in block]
    [source] = [block for block in blocks if "@hookimpl" in block]
    return pyproject, source


def test_the_command_of_the_docstring_works(tmp_path):
    pyproject, source = example(Command)
    site = installed(tmp_path, pyproject, {"__init__.py": source})
    assert re.search(r"^  hello +\S", rlhf(site, "--help", cwd=tmp_path).stdout, re.MULTILINE)
    done = rlhf(site, "hello", "--to", "Ada", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello, Ada.\n", "")


def test_the_backend_of_the_docstring_is_found(tmp_path, forks):
    pyproject, source = example(Backend)
    site = installed(tmp_path, pyproject, {"__init__.py": source})
    words = ["train", "--algo", "sft", "--model", ".", "--data", "x", "--backend", "sharded"]
    code, output = in_fork(forks, site, *words, cwd=tmp_path)
    assert code == 2
    assert "no trainer named 'sharded'. Installed: " in output, "the backend is there, and its trainer is not"


def test_the_check_of_the_docstring_is_asked(tmp_path):
    points, source = example(Check)
    pyproject = PYPROJECT.partition("[project.entry-points")[0].replace("somebodys-plugins", "my-package")
    pyproject += f'{points}\n[tool.flit.module]\nname = "my_package"\n'
    site = installed(tmp_path, pyproject, {"__init__.py": '"""My package."""\n', "checks.py": source})
    done = rlhf(site, "plugins", "check", "mylibrary", "--kind", "check", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (site / "mylibrary.py").write_text("__version__ = '1.0'\n")
    code = "from rlhf_cli.doctor.child import ask; from my_package.checks import version; print(ask(version).value)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(site))
    assert done.stdout == "1.0\n", done.stderr
