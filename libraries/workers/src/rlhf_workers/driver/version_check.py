"""Check that all nodes have the driver's versions of plugins, Python and frameworks."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import PluginVersionMismatch

from rlhf_workers.process.failure import RemoteTraceback
from rlhf_workers.process.worker import installed_version


def check_versions(described: Sequence[Mapping[str, Any]]) -> None:
    """``described``: the result of ``describe`` of every worker. Raises PluginVersionMismatch, which names every node
    that differs."""
    problems: dict[str, list[str]] = {}
    traces = []
    for facts in described:
        differences = problems.setdefault(facts["address"], [])
        for name, version in facts["versions"].items():
            local_version = platform.python_version() if name == "python" else installed_version(name)
            if version != local_version:
                differences.append(f"{name} is {version} there and {local_version} here")
        if facts["problem"] is not None:
            differences.append(facts["problem"].message)
            traces.append(facts["problem"].trace)
    lines = [
        f"node {node}: {'; '.join(dict.fromkeys(differences))}"
        for node, differences in sorted(problems.items())
        if differences
    ]
    if lines:
        raise PluginVersionMismatch(
            "these nodes have different versions from this process:\n  "
            + "\n  ".join(lines)
            + "\nInstall the same versions "
            "everywhere: the same image, or pip install -c constraints.txt"
        ) from (RemoteTraceback("\n".join(traces)) if traces else None)
