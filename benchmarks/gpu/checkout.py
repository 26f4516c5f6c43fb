"""Run from a checkout that is not installed: a machine with a GPU may have torch and no way to install packages.

Plugins are found by metadata, so each distribution's is written from its ``pyproject.toml`` into a folder that goes on
the path beside the sources. Standard library only, as it runs before anything else can be imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def use_checkout(metadata: Path) -> bool:
    """Make ``rlhf`` and its plugins importable here and in child processes; whether that was needed.

    Args:
        metadata: folder to write into.
    """
    if importlib.util.find_spec("rlhf") is not None:
        return False
    paths = [str(metadata)]
    for line in (ROOT / "editable.txt").read_text().splitlines():
        folder = re.fullmatch(r"-e \./(\S+?)(\[.*\])?", line)
        if folder is None:  # a comment, or the root, which has no code
            continue
        source = ROOT / folder[1]
        write_metadata(tomllib.loads((source / "pyproject.toml").read_text())["project"], metadata)
        paths.append(str(source / "src"))
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    return True


def write_metadata(project: dict[str, Any], into: Path) -> None:
    """``NAME-VERSION.dist-info`` of a ``[project]`` table: what finding its plugins and checking their needs reads."""
    name, version = project["name"], project["version"]
    folder = into / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    needs = [f"Requires-Dist: {need}" for need in project.get("dependencies", ())]
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *needs]
    (folder / "METADATA").write_text("\n".join(head) + "\n")
    groups: dict[str, dict[str, str]] = dict(project.get("entry-points", {}))
    if "scripts" in project:
        groups["console_scripts"] = project["scripts"]
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
