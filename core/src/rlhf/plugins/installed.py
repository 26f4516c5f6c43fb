"""Plugins in the metadata of the installed distributions. No plugin is imported."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlhf.errors import did_you_mean
from rlhf.plugins.entry import KINDS, Entry
from rlhf.plugins.requirements import installed_version, unmet, unmet_requirements


def entries(path: Sequence[str] | None = None) -> list[Entry]:
    """One entry for each entry point in a group ``rlhf.X``. If no kind is called X, the entry's status says so.

    Args:
        path: folders in which to look for distributions, in place of ``sys.path``.
    """
    return list(_read(tuple(_folder(name) for name in (sys.path if path is None else path))))


_Folder = tuple[str, tuple[int, ...]]
"""A folder's name, and numbers that change if a distribution is installed or removed there."""


def _folder(name: str) -> _Folder:
    try:
        facts = os.stat(name or ".")
    except OSError:
        return name, ()
    time_ns = time.time_ns()
    # File times have a resolution of milliseconds: an installation right after a read may not change them.
    recent = (time_ns,) if time_ns - facts.st_mtime_ns < 10**9 else ()
    return name, (facts.st_dev, facts.st_ino, facts.st_mtime_ns, *recent)


@lru_cache(maxsize=4)
def _read(folders: tuple[_Folder, ...]) -> tuple[Entry, ...]:
    """The entries in the folders. A command calls this several times, and reading takes a fifth of a second."""
    path = [name for name, _ in folders]
    offers: dict[str, tuple[list[str], list[Entry]]] = {}
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions(path=path):
        # hundreds of other distributions are not parsed
        if "[rlhf." not in (distribution.read_text("entry_points.txt") or ""):
            continue
        points = [p for p in distribution.entry_points if p.group.startswith("rlhf.")]
        metadata = distribution.metadata
        name, its_version = metadata["Name"], metadata["Version"]
        if canonicalize_name(name) in offers:  # the first on the path wins, as for import
            continue
        entries = [Entry(p.group.removeprefix("rlhf."), p.name, name, its_version, p.value) for p in points]
        offers[canonicalize_name(name)] = (metadata.get_all("Requires-Dist") or distribution.requires or [], entries)
        versions[canonicalize_name(name)] = its_version
    version_of = cache(lambda name: versions.get(name) or installed_version(name, path))
    all_entries: list[Entry] = []
    for texts, entries in offers.values():
        status = _unmet(texts, offers, version_of) or "ok"
        all_entries += [replace(e, status=_unknown_kind(e.kind) or status) for e in entries]
    return tuple(all_entries)


def requirements_problem(distribution: str, path: Sequence[str] | None = None) -> str:
    """:func:`~rlhf.plugins.requirements.unmet_requirements`, cached until a distribution is installed or removed,
    because it parses the metadata of all requirements."""
    names = None if path is None else tuple(path)
    return _requirements_problem(distribution, names, tuple(_folder(name) for name in (*(names or ()), *sys.path)))


@lru_cache(maxsize=256)
def _requirements_problem(distribution: str, path: tuple[str, ...] | None, folders: tuple[_Folder, ...]) -> str:
    return unmet_requirements(distribution, path)


_requirement = cache(Requirement)
"""Plugins share most of their requirements."""


def _unmet(texts: Iterable[str], providers: Collection[str], version_of: Callable[[str], str | None]) -> str:
    """The first requirement on a distribution of this project, or on another plugin, that is not met."""
    for text in texts:
        try:
            requirement = _requirement(text)
        except InvalidRequirement:
            return f"has the unreadable requirement {text!r}"
        name = canonicalize_name(requirement.name)
        is_rlhf = name.startswith("rlhf-") or name in providers
        if is_rlhf and (problem := unmet(requirement, version_of(name))):
            return problem
    return ""


def _unknown_kind(kind: str) -> str:
    """Status of an entry in a group that belongs to no kind, so that no lookup can find it."""
    return "" if kind in KINDS else f"no kind is called {kind!r}.{did_you_mean(kind, KINDS)}"
