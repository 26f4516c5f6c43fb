"""The distributions of this repository, read from their pyproject.toml files."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Member:
    """One distribution's folder."""

    folder: Path

    @cached_property
    def pyproject(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def project(self) -> dict[str, Any]:
        return self.pyproject["project"]

    @property
    def name(self) -> str:
        return self.project["name"]

    @property
    def package(self) -> str:
        return self.pyproject["tool"]["flit"]["module"]["name"]

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.package

    @property
    def requirements(self) -> list[Requirement]:
        return [Requirement(text) for text in self.project.get("dependencies", [])]

    @property
    def optional(self) -> list[Requirement]:
        """Requirements of all extras."""
        extras = self.project.get("optional-dependencies", {})
        return [Requirement(text) for extra in extras.values() for text in extra]

    @property
    def ours(self) -> list[Member]:
        """The requirements that are distributions of this repository."""
        return ours(self.requirements)

    @property
    def entry_points(self) -> list[tuple[str, str, str]]:
        """(kind, name, module) of plugins."""
        groups = {g: points for g, points in self._groups.items() if g.startswith("rlhf.")}
        return [(g.removeprefix("rlhf."), n, module) for g, points in groups.items() for n, module in points.items()]

    @property
    def other_groups(self) -> list[str]:
        """Groups of entry points that are not ours."""
        return [g for g in self._groups if not g.startswith("rlhf.")]

    @property
    def _groups(self) -> dict[str, dict[str, str]]:
        return self.project.get("entry-points", {})

    @property
    def is_plugin(self) -> bool:
        return self.folder.parent.parent.name == "plugins"


FOLDERS = ("*", "libraries/*", "plugins/*/*")
MEMBERS = [Member(p.parent) for p in sorted(p for f in FOLDERS for p in ROOT.glob(f"{f}/pyproject.toml"))]
BY_NAME = {member.name: member for member in MEMBERS}
PLUGINS = [member for member in MEMBERS if member.entry_points]
"""Those that register plugins: all in the folder of that name, the command line, and a library may."""
ROOT_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(member: Member) -> str:
    """The id of a member for pytest."""
    return member.name


def ours(requirements: list[Requirement]) -> list[Member]:
    """The requirements that are distributions of this repository."""
    return [BY_NAME[n] for r in requirements if (n := canonicalize_name(r.name)) in BY_NAME]


def required(member: Member) -> list[Member]:
    """The member and the members it requires, transitively."""
    members = {member.name: member}
    queue = [member]
    while queue:
        for needed in ours(queue.pop().requirements):
            if needed.name not in members:
                members[needed.name] = needed
                queue.append(needed)
    return list(members.values())
