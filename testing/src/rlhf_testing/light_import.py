"""The check that a module imports no framework. Those of commands and of checks are imported to show what there is."""

from __future__ import annotations

import subprocess
import sys

from rlhf_testing.contract import expect

FRAMEWORKS = ("torch", "transformers", "datasets", "vllm", "deepspeed", "ray")


def expect_light_import(about: str, module: str, remedy: str) -> None:
    """Fails where importing ``module``, in a process of its own, fails or imports a framework.

    Args:
        about: the component, at the beginning of messages.
        remedy: what its author can do, at their end.
    """
    code = f"import sys, {module}; print(*(m for m in {FRAMEWORKS!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expect(done.returncode == 0, f"{about} its module cannot be imported: {done.stderr[-500:]}")
    frameworks = done.stdout.split()
    expect(not frameworks, f"{about} importing {module} imports {frameworks}; {remedy}")
