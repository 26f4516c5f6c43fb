from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for groups

from groups import LIMITS
from rlhf_plugin_code.interpreter import interpreter
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher

NO_BWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


def pytest_itemcollected(item):
    item.add_marker(pytest.mark.linux("programs run in a Linux sandbox"))


@pytest.fixture(scope="session", params=[pytest.param("bwrap", marks=NO_BWRAP), "sandlock"])
def launcher(request):
    """One sandbox after the other."""
    instance = SandboxLauncher(request.param, interpreter(None), LIMITS)
    yield instance
    instance.close()


@pytest.fixture(scope="session")
def unisolated():
    instance = SandboxLauncher("limits", interpreter(None), LIMITS)
    yield instance
    instance.close()


@pytest.fixture(scope="session")
def run(launcher):
    """``run(program, ...)`` in the sandbox."""
    return lambda *words, **options: asyncio.run(launcher.run(*words, **options))


@pytest.fixture(scope="session")
def code_reward(launcher):
    """``code_reward(**options)``: a reward that uses the sandbox."""
    from rlhf_plugin_code.reward import CodeReward

    def make(**options):
        reward = CodeReward(CodeReward.Config(cpu_seconds=1, sandbox=launcher.sandbox, **options))
        reward._launcher = launcher
        return reward

    return make
