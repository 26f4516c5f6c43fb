"""`rlhf plugins check NAME` passes for the plugins of this repository, which supply the inputs in their classes."""

from __future__ import annotations

import pytest
from rlhf.plugins import Entry, Plugins
from rlhf_testing import conformance

LIGHT = ("advantage", "loss", "reward", "env", "rollout", "adapter")
"""Kinds without models or services; the suites of the others are in their own tests, and take minutes."""
STARTING = ("code", "agent")
"""A reward and a rollout that start processes, as every environment does."""
PLUGINS = Plugins.discover()
ENTRIES = [
    pytest.param(e, marks=pytest.mark.full if kind == "env" or e.name in STARTING else (), id=f"{kind}-{e.name}")
    for kind in LIGHT
    for e in PLUGINS.list(kind)
]
"""In ``make test``, plugins that start processes pass the suite in their own tests only."""


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_shipped_plugin_passes_its_check(entry: Entry) -> None:
    results = conformance.run(PLUGINS.resolve(entry.kind, f"{entry.distribution}/{entry.name}"))
    assert [(r.name, r.detail) for r in results if not r.passed] == []
    assert sum(not r.skipped for r in results) >= 2
