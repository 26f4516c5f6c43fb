"""The real package in its own Python, which the documented command makes, and the laboratory with the rollout."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.plugins import isolate
from rlhf_plugin_verifiers import Verifiers
from rlhf_testing.chat_templates import HERMES

from tests import laboratory

ENVIRONMENTS = Path(__file__).parent / "environments"


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """``RLHF_TEST_ENVIRONMENTS`` names a folder in which the environment is kept."""
    setting = os.environ.get("RLHF_TEST_ENVIRONMENTS")
    folder = (Path(setting) if setting else tmp_path_factory.getbasetemp()) / "verifiers"
    if not folder.exists():
        isolate(Plugins.discover().resolve("rollout", "verifiers"), folder, sys.executable, [])
    return str(folder / "bin" / "python")


class Laboratory(laboratory.Laboratory):
    def __init__(self, path, python):
        super().__init__(path)
        self.python = python

    def rollout(self, **options):
        return Verifiers(Verifiers.Config(**{"id": "adding", "python": self.python, **options}))

    def played(self, args, indices=(0,), options=None, **settings):
        """The samples of examples."""
        rollout = self.rollout(args=args, **(options or {}))
        rows = [{"prompt": "", "index": n} if isinstance(n, int) else n for n in indices]
        groups = self.groups(rollout, rows, **{"max_tokens": 2000, **settings})
        return [t for group in groups for t in group.trajectories]


@pytest.fixture(scope="session")
def laboratory_of(tmp_path_factory, python):
    instance = Laboratory(laboratory.talking_model(tmp_path_factory.mktemp("verifiers") / "model", HERMES), python)
    yield instance
    instance.close()


@pytest.fixture
def lab(laboratory_of, monkeypatch):
    monkeypatch.chdir(ENVIRONMENTS)
    return laboratory_of
