"""Throwaway packages and distributions that this process and its children find before the real ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


class Site:
    """A folder at the head of ``sys.path`` and of ``PYTHONPATH``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, source: str) -> None:
        (self.path / f"{name}.py").write_text(source)

    def distribution(
        self, name: str, version: str = "0.1.0", requires: Sequence[str] = (), python: str = "", entry_points: str = ""
    ) -> None:
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires] + ([f"Requires-Python: {python}"] if python else [])
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        if entry_points:
            (info / "entry_points.txt").write_text(entry_points)

    def reward(self, name: str, source: str, requires: Sequence[str] = ()) -> None:
        """A distribution with one reward plugin, defined by ``source``."""
        self.module(f"throwaway_{name}", source)
        points = f"[rlhf.reward]\n{name} = throwaway_{name}\n"
        self.distribution(f"rlhf-plugin-{name}", requires=requires, entry_points=points)


@pytest.fixture
def site(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep))
    yield Site(folder)
    for module in [m for m in sys.modules if m.startswith("throwaway_")]:
        del sys.modules[module]
