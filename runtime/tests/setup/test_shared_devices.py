"""Whether an engine is told that roles are on its devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rlhf.interfaces import GENERATOR, Place
from rlhf_runtime.setup.launch import _shares_devices

PROCESSES, IN_PROCESS = frozenset({"processes"}), frozenset({"in_process"})


@pytest.mark.parametrize(
    ("place", "launcher", "shared"),
    [
        (Place(share="policy"), PROCESSES, True),
        (Place(), PROCESSES, False),
        (Place(), IN_PROCESS, True),  # one process has one device
        (None, IN_PROCESS, False),
    ],
)
def test_an_engine_is_told_that_roles_are_on_its_devices(place: Any, launcher: frozenset[str], shared: bool) -> None:
    places = {"policy": Place()} | ({} if place is None else {GENERATOR: place})
    run: Any = SimpleNamespace(places=places)
    assert _shares_devices(run, SimpleNamespace(capabilities=launcher)) is shared  # type: ignore[arg-type]
