"""``ray job submit``: the driver is a process of the cluster. Needs the job server, which ``ray[default]`` has."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from ray_nodes import RAY, RayNodes
from ray_paths import HERE, PATHS

from tests.support.two_hosts import ADDRESSES, NotPermitted

pytestmark = pytest.mark.full


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="needs the job server: ray[default]")
def test_a_submitted_job_uses_the_cluster_of_the_job():
    try:
        with RayNodes(PATHS, cpus=6, dashboard=True) as nodes:
            server = f"http://{ADDRESSES[0]}:8265"
            job = [sys.executable, str(HERE / "job_run.py")]
            done = nodes.run(*RAY, "job", "submit", "--address", server, "--", *job)
    except NotPermitted as cause:
        pytest.skip(f"needs root, to make network namespaces: {cause}")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "succeeded" in output
    [report] = [json.loads(x) for x in output.splitlines() if x.startswith('{"threads"')]
    assert report["threads"] == ["3", "3"]
    assert report["mine"] == "1", "Ray sets 1 in a job; that is not the user's choice for the workers"
