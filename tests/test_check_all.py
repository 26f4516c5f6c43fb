"""`rlhf plugins check NAME` passes for the plugins of this repository, which supply the inputs in their classes."""

from __future__ import annotations

import pytest
from rlhf.plugins import Entry, Plugins
from rlhf_testing import conformance

LIGHT = ("advantage", "loss", "reward", "env", "rollout", "adapter")
"""Kinds without models or services; the suites of the others are in their own tests, and take minutes."""
PLUGINS = Plugins.discover()
ENTRIES = [
    pytest.param(e, marks=pytest.mark.full if kind == "env" else (), id=f"{kind}-{e.name}")
    for kind in LIGHT
    for e in PLUGINS.list(kind)
]
"""In ``make test``, environments pass the suite in their own tests only: each starts processes."""


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_shipped_plugin_passes_its_check(entry: Entry) -> None:
    results = conformance.run(PLUGINS.resolve(entry.kind, f"{entry.distribution}/{entry.name}"))
    assert [(r.name, r.detail) for r in results if not r.passed] == []
    assert sum(not r.skipped for r in results) >= 2
