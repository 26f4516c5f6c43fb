"""Virtual environments into which pip installs wheels of this repository, as a user does from a package index."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.members import BY_NAME, ROOT


def build_wheels(folder: Path) -> Path:
    """``make wheels`` into this folder, with the Python of the tests. Returns the folder."""
    words = [
        "make",
        "--silent",
        "--old-file=.venv/.builder",
        "wheels",
        f"BIN={Path(sys.executable).parent}",
        f"DIST={folder}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def third_parties(distribution: str) -> set[str]:
    """Names of the distributions that this one needs, transitively, and that are not of this repository."""
    requirements: set[tuple[str, str]] = set()
    queue = [(distribution, "")]
    while queue:
        name, extra = queue.pop()
        for text in importlib.metadata.requires(name) or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                steps = {(canonicalize_name(needed.name), e) for e in ("", *needed.extras)} - requirements
                requirements |= steps
                queue += steps
    return {name for name, _ in requirements} - set(BY_NAME)


@cache
def files_of(distribution: str) -> list[Path]:
    """The files and folders in site-packages that belong to an installed distribution."""
    metadata = importlib.metadata.distribution(distribution)
    tops = {file.parts[0] for file in metadata.files or ()} - {"..", "__pycache__"}
    return [Path(str(metadata.locate_file(top))) for top in sorted(tops)]


def all_third_parties() -> list[Path]:
    """Everything in the site-packages of the tests that is not of this repository."""
    folder = Path(importlib.metadata.distribution("pip").locate_file(""))
    return [f for f in folder.iterdir() if not f.name.startswith(("rlhf", "__editable__")) and f.suffix != ".pth"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that sees nothing of the environment of the tests but the links it was made with."""

    folder: Path
    wheels: Path

    @classmethod
    def make(cls, folder: Path, wheels: Path, files: Iterable[Path]) -> Environment:
        """Args:
        files: files and folders of installed third-party distributions. They are linked, not copied. Editable
            distributions are not among them, so pip and Python find ours in the wheels only.
        """
        venv.create(folder, symlinks=True)
        links = folder / "third_parties"
        links.mkdir()
        for file in files:
            (links / file.name).symlink_to(file)
        environment = cls(folder, wheels)
        (environment.site / "third_parties.pth").write_text(f"{links}\n")
        return environment

    @property
    def site(self) -> Path:
        """Where pip installs."""
        [folder] = (self.folder / "lib").glob("python*/site-packages")
        return folder

    def install(self, *requirements: str) -> None:
        """``pip install``, from the wheels alone."""
        words = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-build-isolation"]
        python = ["-m", "pip", "--python", str(self.folder / "bin" / "python")]
        options = ["--find-links", str(self.wheels)]
        self._run([sys.executable, *python, "install", *words, *options, *requirements], self.folder)

    def run(self, program: str, *words: str, cwd: Path | None = None) -> str:
        """What a program of this environment prints. It must end well."""
        return self._run([str(self.folder / "bin" / program), *words], cwd or self.folder)

    def _run(self, command: list[str], cwd: Path) -> str:
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {n: v for n, v in os.environ.items() if n not in hidden and not n.startswith("PIP_")}
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{os.defpath}"
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout
