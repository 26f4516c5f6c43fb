"""What the metadata of the installed distributions says about plugins; none of them is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlhf.errors import did_you_mean
from rlhf.plugins import requirements
from rlhf.plugins.entry import KINDS, Entry


def entries(path: Sequence[str] | None = None) -> list[Entry]:
    """One for each entry point in a group ``rlhf.X``; where no kind is called X, its status says so.

    Args:
        path: folders in which to look for distributions, in place of ``sys.path``.
    """
    offers: dict[str, tuple[Any, list[Entry]]] = {}
    for found in importlib_metadata.distributions(**({} if path is None else {"path": [*path]})):
        points = [p for p in found.entry_points if p.group.startswith("rlhf.")]
        if not points:
            continue
        name = found.metadata["Name"]  # parsed for plugins only: a hundred other distributions need not be
        own = [Entry(p.group.removeprefix("rlhf."), p.name, name, found.version, p.value) for p in points]
        offers.setdefault(canonicalize_name(name), (found, own))  # the first on the path, as for import
    read: list[Entry] = []
    for found, own in offers.values():
        status = _unmet(found.requires or (), offers, path) or "ok"
        read += [replace(e, status=_unknown_kind(e.kind) or status) for e in own]
    return read


def version(distribution: str, path: Sequence[str] | None = None) -> str | None:
    """Version of an installed distribution; None where there is none. ``path`` as for :func:`entries`."""
    if path is not None and canonicalize_name(distribution) != "rlhf-core":  # the core is the running one
        for found in importlib_metadata.distributions(name=distribution, path=[*path]):
            return found.version
    return requirements.installed_version(distribution)


def _unmet(texts: Iterable[str], providers: Collection[str], path: Sequence[str] | None) -> str:
    """The first requirement on a distribution of this project, or on another plugin, that is not met."""
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            return f"has the unreadable requirement {text!r}"
        name = canonicalize_name(requirement.name)
        ours = name.startswith("rlhf-") or name in providers
        if ours and (problem := requirements.unmet(requirement, version(name, path))):
            return problem
    return ""


def _unknown_kind(kind: str) -> str:
    """Status of an entry in a group that no kind reads: nothing would ever find it."""
    return "" if kind in KINDS else f"no kind is called {kind!r}.{did_you_mean(kind, KINDS)}"
