"""Several nodes: two Ray nodes in two network namespaces of this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from ray_nodes import RayNodes
from ray_paths import HERE, PATHS

from tests.support.two_hosts import ADDRESSES, INTERFACE, NotPermitted

pytestmark = pytest.mark.full


def other_version(folder: Path) -> Path:
    """A folder that gives rlhf-plugin-local the version 9.9.9 if it is on the path."""
    info = folder / "rlhf_plugin_local-9.9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-plugin-local\nVersion: 9.9.9\n")
    (info / "entry_points.txt").write_text("[rlhf.trainer]\ntorch = rlhf_plugin_local\n")
    return folder


@pytest.mark.slow
def test_a_run_spreads_over_two_nodes_and_reports_a_lost_node(tmp_path):
    other = f"{other_version(tmp_path / 'other')}:{PATHS}"
    try:
        with RayNodes(PATHS, other) as nodes:
            done = nodes.run(sys.executable, str(HERE / "two_nodes_run.py"), str(nodes.raylet(1)))
    except NotPermitted as cause:
        pytest.skip(f"needs root, to make network namespaces: {cause}")
    results = {r["scenario"]: r for r in map(json.loads, (x for x in done.stdout.splitlines() if x.startswith("{")))}
    assert len(results) == 3, f"{done.stdout}\n{done.stderr}"

    spread = results["spread"]
    assert "error" not in spread, spread
    assert sorted(spread["nodes"]) == sorted(spread["engines"]) == list(ADDRESSES)
    assert spread["sums"] == [3.0, 3.0], "an all-reduce across the nodes"
    assert spread["interfaces"] == [INTERFACE] * 2
    assert spread["rendezvous"].startswith(f"tcp://{spread['nodes'][0]}:")
    assert spread["proven"] == [True, True]
    assert spread["answers"] == list(range(6))

    differs = results["differs"]
    assert differs["error"] == "PluginVersionMismatch"
    assert (
        f"node {ADDRESSES[1]}: the installed plugins differ from those of the run: trainer 'torch'"
        in differs["message"]
    )
    assert "is version 9.9.9 here" in differs["message"]
    assert f"node {ADDRESSES[0]}" not in differs["message"]

    lost = results["loses_a_node"]
    assert lost["error"] == "WorkerError"
    assert f"(node {ADDRESSES[1]}, pid" in lost["message"]
    assert "died during sleeps()" in lost["message"]
