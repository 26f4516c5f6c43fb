"""A process that uses Ray gets the exit codes of its children."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.full

START = {"by the launcher": "", "by the user": "import ray; ray.init('local', num_cpus=1, include_dashboard=False)\n"}


@pytest.mark.parametrize("start", START)
def test_exit_codes_of_children_are_not_lost(start, monkeypatch):
    monkeypatch.setenv("RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper", "true")
    code = (
        f"import subprocess, sys\n{START[start]}"
        "from rlhf.interfaces import Place\n"
        "from rlhf_plugin_ray.launcher import RayLauncher\n"
        f"launcher = RayLauncher(RayLauncher.Config({'' if START[start] else 'cpus=1'}))\n"
        "child = [sys.executable, '-c', 'raise SystemExit(3)']\n"
        "launcher.place({'policy': Place()})\n"
        "during = subprocess.run(child).returncode\n"
        "launcher.shutdown()\n"
        "print(during, subprocess.run(child).returncode)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["3", "3"], run.stdout + run.stderr
