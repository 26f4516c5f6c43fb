"""A process that uses Ray still learns how its own children ended."""

from __future__ import annotations

import subprocess
import sys


def test_exit_codes_of_children_are_not_lost():
    code = (
        "import subprocess, sys\n"
        "from rlhf.interfaces import Place\n"
        "from rlhf_plugin_ray.launcher import RayLauncher\n"
        "launcher = RayLauncher(RayLauncher.Config(cpus=1))\n"
        "child = [sys.executable, '-c', 'raise SystemExit(3)']\n"
        "launcher.place({'policy': Place()})\n"
        "during = subprocess.run(child).returncode\n"
        "launcher.shutdown()\n"
        "print(during, subprocess.run(child).returncode)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["3", "3"], run.stdout + run.stderr
