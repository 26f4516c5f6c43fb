"""Throwaway distributions: real ``.dist-info`` folders beside their modules, on ``sys.path``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from rlhf.plugins import Plugins

REWARD = '''
from rlhf import hookimpl
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Thing(Reward):
    """Scores one."""
    name = "{name}"

    async def score(self, group):
        return [RewardResult(1.0) for _ in group.trajectories]

@hookimpl
def rlhf_register_reward():
    return [Thing]
'''


class Site:
    """A folder on ``sys.path`` into which distributions are written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(
        self,
        distribution: str,
        points: Mapping[str, Mapping[str, str]],
        modules: Mapping[str, str] | None = None,
        version: str = "0.1.0",
        requires: Sequence[str] = ("rlhf-core>=0.1,<0.2",),
    ) -> None:
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        lines += [f"Requires-Dist: {r}" for r in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")
        groups = [f"[{group}]\n" + "".join(f"{n} = {m}\n" for n, m in names.items()) for group, names in points.items()]
        (info / "entry_points.txt").write_text("\n".join(groups))
        for name, source in (modules or {}).items():
            (self.path / f"{name}.py").write_text(source)

    def reward(self, name: str, distribution: str = "", module: str = "", source: str = "", **kwargs: object) -> None:
        """A distribution with one reward, by default a working one."""
        distribution = distribution or f"rlhf-plugin-{name}"
        module = module or f"throwaway_{distribution.replace('-', '_')}"
        text = source or REWARD.format(name=name)
        self.add(distribution, {"rlhf.reward": {name: module}}, {module: text}, **kwargs)  # type: ignore[arg-type]

    def plugins(self) -> Plugins:
        """What is installed in this folder alone."""
        return Plugins.discover([str(self.path)])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield Site(tmp_path)
    for name in set(sys.modules) - modules:
        if name.startswith(("throwaway", "rlhf_file_")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """write(name, text) -> the path of a file with that text."""

    def make(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return make
