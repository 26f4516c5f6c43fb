"""The laboratory with the rollout ``agent``, and programs for it."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from rlhf_plugin_agent import Agent
from rlhf_testing.chat_templates import HERMES, QWEN3

from tests import laboratory as shared
from tests.laboratory import CALL, talking_model

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for programs


class Laboratory(shared.Laboratory):
    def groups(self, options, rows=({},), samples=1, **settings):
        return super().groups(Agent(Agent.Config(**options)), rows, samples, **settings)

    def one(self, options, row=None, **settings):
        """One sample."""
        [group] = self.groups(options, [row or {}], **settings)
        return group.trajectories[0]


@pytest.fixture(scope="session")
def laboratories(tmp_path_factory):
    cache = {}

    def make(template, call=CALL):
        if (template, call) not in cache:
            folder = tmp_path_factory.mktemp("agent") / "model"
            cache[template, call] = Laboratory(talking_model(folder, template, call))
        return cache[template, call]

    yield make
    for instance in cache.values():
        instance.close()


@pytest.fixture(scope="session")
def laboratory():
    """The class, for tests with models of their own."""
    return Laboratory


@pytest.fixture
def lab(laboratories):
    return laboratories(HERMES)


@pytest.fixture
def thinking(laboratories):
    return laboratories(QWEN3)


@pytest.fixture(scope="session")
def python_with(tmp_path_factory):
    return partial(shared.python_with, tmp_path_factory.getbasetemp())


@pytest.fixture
def wire(tmp_path):
    """A file into which a program writes what it got over the wire, and its lines."""
    path = tmp_path / "wire.jsonl"

    def lines():
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    lines.path = str(path)
    return lines


@pytest.fixture
def program(tmp_path):
    """Options for a function ``run`` with this body; ``ask`` posts a request and returns status and answer."""

    def make(body, head="def run(task, base_url, api_key):", **options):
        path = tmp_path / "agent.py"
        lines = body.strip("\n").splitlines()
        path.write_text(
            (HERE / "ask.py").read_text() + "\n\n" + head + "\n" + "\n".join(f"    {x}" for x in lines) + "\n"
        )
        return {"program": f"file:{path}:run", **options}

    return make
