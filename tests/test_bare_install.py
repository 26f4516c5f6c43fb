"""Light plugins work in an environment that holds what they require and nothing else: no torch, no transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

import importlib_metadata
import pytest
from flit_core import buildapi
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.members import BY_NAME, PLUGINS, Member, name_of, required

LIGHT = ["rlhf-plugin-length", "rlhf-plugin-format", "rlhf-plugin-number-game", "rlhf-plugin-turns", "rlhf-plugin-math"]
HEAVY = ("torch", "transformers", "datasets")
CODE = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
from rlhf.plugins import Plugins
plugins = Plugins.discover()
print(json.dumps([[e.kind, plugins.resolve(e.kind, e.name).cls.name] for e in plugins.list()]))
"""
SCORE = """
import asyncio, inspect, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn
length = Plugins.discover().resolve("reward", "length").cls
reward = length(length.Config(high=2, per_token=0.25))
row = Row({}, "train", 0)
answers = [Trajectory(row, [Turn([5], False), Turn([7] * tokens, True)], (0, i)) for i, tokens in enumerate((1, 4))]
scores = reward.score(Group(row, 0, answers))
scores = asyncio.run(scores) if inspect.isawaitable(scores) else scores
print([score.value for score in scores], [m for m in ("torch", "transformers", "datasets") if m in sys.modules])
"""


def third_parties(requirements: Iterable[Requirement]) -> set[str]:
    """Names of the installed distributions that these need, transitively, and that are not of this repository."""
    found: set[str] = set()
    queue = list(requirements)
    while queue:
        wanted = queue.pop()
        name = canonicalize_name(wanted.name)
        extras = ("", *wanted.extras)
        if wanted.marker is not None and not any(wanted.marker.evaluate({"extra": e}) for e in extras):
            continue
        if name in found or name in BY_NAME:
            continue
        found.add(name)
        queue += [Requirement(text) for text in importlib_metadata.requires(name) or ()]
    return found


@pytest.fixture
def bare(member: Member, tmp_path: Path) -> list[str]:
    """Folders for ``sys.path``: the wheels of a plugin and of what it requires, and links to third parties."""
    members = required(member)
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        for m in members:
            patch.chdir(m.folder)
            unpacked = tmp_path / m.name
            zipfile.ZipFile(tmp_path / buildapi.build_wheel(str(tmp_path))).extractall(unpacked)
            folders.append(str(unpacked))
    links = tmp_path / "third_parties"
    links.mkdir()
    for name in third_parties(r for m in members for r in m.requirements):
        for file in importlib_metadata.files(name) or ():
            top = Path(file).parts[0]
            if top != ".." and not (links / top).exists():
                (links / top).symlink_to(importlib_metadata.distribution(name).locate_file(top))
    standard = sysconfig.get_path("stdlib")
    return [*folders, str(links), standard, str(Path(standard) / "lib-dynload")]


def in_bare(code: str, path: list[str]) -> str:
    """What Python prints that has these folders and no site-packages."""
    command = [sys.executable, "-I", "-S", "-c", code, json.dumps(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("member", [m for m in PLUGINS if m.name in LIGHT], ids=name_of)
def test_it_works_without_torch(member: Member, bare: list[str]) -> None:
    assert sorted(json.loads(in_bare(CODE, bare))) == sorted([kind, name] for kind, name, _ in member.entry_points)
    for heavy in HEAVY:
        with pytest.raises(AssertionError, match="ModuleNotFoundError"):
            in_bare(f"import json, sys\nsys.path[:0] = json.loads(sys.argv[1])\nimport {heavy}", bare)


@pytest.mark.parametrize("member", [BY_NAME["rlhf-plugin-length"]], ids=name_of)
def test_the_reward_length_measures_there(member: Member, bare: list[str]) -> None:
    assert in_bare(SCORE, bare) == "[0.0, -0.5] []\n"
