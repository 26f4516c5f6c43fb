"""Version requirements, checked in metadata before anything is imported."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import rlhf
from rlhf.errors import ConfigError, PluginVersionMismatch

META = "rlhf-kit"
"""The distribution that requires all others. (``rlhf`` on the public index is another project.)"""


def installed_version(distribution: str, path: Sequence[str] | None = None) -> str | None:
    """Version of an installed distribution; None if it is not installed. For ``rlhf-core``: of the running code.

    Args:
        path: folders in which to look for the distribution before ``sys.path``.
    """
    if canonicalize_name(distribution) == "rlhf-core":
        return rlhf.__version__
    if path is not None:
        for match in importlib.metadata.distributions(name=distribution, path=[*path]):
            return _version(match)
    try:
        return _version(importlib.metadata.distribution(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def _version(distribution: importlib.metadata.Distribution) -> str:
    """The version, read from the top of the metadata. ``distribution.version`` parses all of it, which takes
    milliseconds for a large package."""
    for line in (distribution.read_text("METADATA") or "").splitlines():
        if line.startswith("Version:"):
            return line.removeprefix("Version:").strip()
    return distribution.version


def published(path: Sequence[str] | None = None) -> frozenset[str]:
    """Distributions that are known to exist: those that ``rlhf-kit`` requires, also in its extras. Messages suggest
    ``pip install`` for these only, because anybody can publish a package under a free name. Empty if ``rlhf-kit`` is
    not installed.

    Args:
        path: folders in which to look for ``rlhf-kit``, in place of ``sys.path``.
    """
    for kit in importlib.metadata.distributions(name=META, path=[*(sys.path if path is None else path)]):
        return frozenset(canonicalize_name(Requirement(text).name) for text in kit.requires or ())
    return frozenset()


def source_folder(distribution: str, path: Sequence[str] | None = None) -> Path | None:
    """The folder of a distribution in the checkout from which ``rlhf-core`` is installed in place; None if there is no
    such checkout or folder. A distribution in a checkout need not be on a package index.

    Args:
        path: folders in which to look for ``rlhf-core``, in place of ``sys.path``.
    """
    core = next(
        iter(importlib.metadata.distributions(name="rlhf-core", path=[*(sys.path if path is None else path)])), None
    )
    place = json.loads((core and core.read_text("direct_url.json")) or "{}")
    if not place.get("dir_info", {}).get("editable"):
        return None
    root, name = Path(unquote(urlsplit(place["url"]).path)).parent, canonicalize_name(distribution)
    for pattern in ("", "*/", "libraries/*/", "plugins/*/*/"):
        for file in root.glob(f"{pattern}pyproject.toml"):
            if f'\nname = "{name}"\n' in file.read_text(encoding="utf-8"):
                return file.parent
    return None


def pip_words(distribution: str, specifier: str = "", path: Sequence[str] | None = None) -> str:
    """The arguments of ``pip install`` for a distribution of this project."""
    folder = source_folder(distribution, path)
    if folder is not None:
        return f"-e {shlex.quote(str(folder))}"
    return f"'{distribution}{specifier}'" if specifier else distribution


def unmet(requirement: Requirement, version: str | None, extra: str = "") -> str:
    """``needs X, found Y`` or an empty string. Requirements whose marker does not apply here count as met, and so do
    requirements of extras other than ``extra``."""
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
        return ""
    spec = f"{requirement.name}{requirement.specifier}"
    if version is None:
        return f"needs {spec}, which is not installed"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"needs {spec}, found {version}"
    return ""


def unmet_requirements(distribution: str, path: Sequence[str] | None = None) -> str:
    """The direct requirements of a distribution that are not met, also on third parties: ``needs X, found Y; needs Z,
    which is not installed. Try: pip install 'X' 'Z'``. Empty if all are met, or the distribution is not installed.

    Args:
        path: folders in which to look for ``distribution``, in place of ``sys.path``.
    """
    problems, words = [], []
    for metadata in importlib.metadata.distributions(name=distribution, path=[*(sys.path if path is None else path)]):
        for text in metadata.requires or ():
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                return f"has the unreadable requirement {text!r}"
            if problem := unmet(requirement, installed_version(requirement.name, path)):
                problems.append(problem)
                words.append(pip_words(requirement.name, str(requirement.specifier), path))
        break  # the first on the path wins, as for import
    return f"{'; '.join(problems)}. Try: pip install {' '.join(words)}" if problems else ""


def unmet_optional(distribution: str, name: str, version: str) -> str:
    """The same for what an extra of ``distribution`` requires of the distribution ``name``. The plugin itself
    determined that ``version`` is installed."""
    for metadata in importlib.metadata.distributions(name=distribution):
        for requirement in map(Requirement, metadata.requires or ()):
            names_match = canonicalize_name(requirement.name) == canonicalize_name(name)
            if names_match and not requirement.specifier.contains(version, prereleases=True):
                words = pip_words(requirement.name, str(requirement.specifier))
                return f"needs {requirement.name}{requirement.specifier}, found {version}. Try: pip install {words}"
        break
    return ""


def check_requirements(requirements: Iterable[str], path: Sequence[str] | None = None) -> None:
    """Check ``run.requires`` of a run file, e.g. ``["rlhf-plugin-math>=0.1"]``.

    Args:
        path: as for :func:`published` and :func:`installed_version`.

    Raises:
        ConfigError: a text that is not a requirement.
        PluginVersionMismatch: names every requirement that is not met, and the pip line for those distributions that
            are known to exist.
    """
    problems, packages = [], []
    for text in requirements:
        try:
            requirement = Requirement(text)
            version = installed_version(requirement.name, path)
            problem = unmet(requirement, version)
        except ValueError as cause:  # InvalidRequirement is one; so is a version number of thousands of digits
            reason = str(cause).splitlines()[0]
            raise ConfigError(
                f"run.requires: {text!r} is not a requirement ({reason}); write e.g. 'rlhf-plugin-math>=0.1'"
            ) from cause
        if problem:
            problems.append(problem)
            if version is not None or canonicalize_name(requirement.name) in published(path):
                packages.append(pip_words(requirement.name, str(requirement.specifier), path))
    if problems:
        line = f" Try: pip install {' '.join(packages)}" if packages else ""
        raise PluginVersionMismatch(f"the run {'; '.join(problems)}.{line}")
