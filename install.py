"""Installs the distributions of this repository in place, with what they require, into the Python that runs it.

`make install` and `make quickstart` call it: ``python install.py`` or ``python install.py small``. It uses uv, which is
several times faster than pip, where uv is at hand. Where uv fails it uses pip: uv does not read pip's configuration,
such as further indexes. With pip, one environment builds all distributions, in place of one for each; what they require
comes after them, because some of it brings build tools of its own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

HEAVY = re.compile(r"backends/(deepspeed|ray|vllm)|envs/(reasoning_gym|gymnasium|textarena)")
"""What the quick start leaves out, with what the tests of the repository need: not every machine can have them."""
NOISE = re.compile(r" already satisfied|^ *(Created|Stored|Preparing|Checking|Getting|Attempting|Found|Uninstalling) ")


def places(small: bool) -> list[str]:
    """Folders with extras, such as ``./cli[completion,gguf]``, of ``editable.txt``."""
    lines = Path("editable.txt").read_text(encoding="utf-8").splitlines()
    folders = [line.removeprefix("-e ") for line in lines if line.startswith("-e ")]
    return [place.replace("[dev]", "[test]") for place in folders if not HEAVY.search(place)] if small else folders


def commands(places: list[str], uv: str | None) -> list[list[str]]:
    """The commands that install, in order."""
    limits = ["-c", "constraints.txt"]
    if uv is not None:
        return [[uv, "pip", "install", "--python", sys.executable, *limits, *(w for p in places for w in ("-e", p))]]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off"]
    folders = [place.partition("[")[0] for place in places]
    names = [
        tomllib.loads(Path(folder, "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        + place[len(folder) :]
        for folder, place in zip(folders, places, strict=True)
    ]
    return [
        [*pip, "--no-deps", "--no-build-isolation", *(word for folder in folders for word in ("-e", folder))],
        [*pip, *limits, *names],
    ]


def run(command: list[str]) -> int:
    """Runs it, and shows its lines except for those that say that nothing is to be done."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not NOISE.search(line):
                sys.stdout.write(line)
                sys.stdout.flush()
    return process.returncode


def main() -> int:
    if sys.platform == "darwin" and "small" not in sys.argv[1:]:
        sys.exit("vLLM and DeepSpeed have no packages for macOS. Use make quickstart, make quick, or install.py small")
    folders, uv, start = places("small" in sys.argv[1:]), shutil.which("uv"), time.monotonic()
    failed = False
    for tool in [uv, None] if uv else [None]:
        sys.stdout.write(f"installing into {sys.prefix} with {'uv' if tool else 'pip'}, a few minutes ...\n")
        sys.stdout.flush()
        failed = any(run(command) for command in commands(folders, tool))
        if not failed:
            sys.stdout.write(f"installed in {time.monotonic() - start:.0f} s\n")
            break
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
