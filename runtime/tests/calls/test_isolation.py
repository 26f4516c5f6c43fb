"""A plugin runs under the Python of a virtual environment, with a package that is installed only there."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import sys
import venv
from pathlib import Path

import pytest
from rlhf.errors import ConfigError, EnvError
from rlhf.interfaces import Env
from rlhf.plugins import Plugins
from rlhf.types import EnvStep, Row
from rlhf_runtime.config.sections import EnvSection
from rlhf_runtime.data.sources import SourceLayout
from rlhf_runtime.rewards.scoring import ActiveReward
from rlhf_runtime.samples.episodes import Episodes

from tests.support.scoring import score

ADAPTER = """
from rlhf import hookimpl
from rlhf.interfaces import ComponentConfig, Env
from rlhf.types import EnvStep


class Config(ComponentConfig):
    times: int = 1


class Heavy(Env):
    name = "heavy_env"
    Config = Config

    def reset(self, row, seed):
        import heavy

        self.word = heavy.WORD
        return self.word * self.config.times

    def step(self, action):
        import importlib.util
        import os
        import subprocess
        import sys

        code = "import heavy, sys; print(sys.prefix)"
        python = subprocess.run(["python", "-c", code], capture_output=True, text=True)
        absent = [n for n in ("torch", "numpy", "transformers") if importlib.util.find_spec(n) is None]
        info = {"prefix": sys.prefix, "program": python.stdout.strip(), "absent": absent}
        return EnvStep(os.environ.get("PYTHONPATH", "none"), 1.0, True, info=info)


@hookimpl
def rlhf_register_env():
    return [Heavy]
"""
METADATA = """Metadata-Version: 2.4
Name: rlhf-plugin-heavy-env
Version: 3.1.0
Requires-Dist: rlhf-core>=0.1,<0.2
Provides-Extra: isolated
Requires-Dist: heavy==2.0; extra == "isolated"

The README.
"""
OF_THE_CORE = (
    "pluggy",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "packaging",
)
ROW = Row({"prompt": "?"}, "unit", 0, SourceLayout({}))


def distribution(folder: Path, name: str, metadata: str, module: str, text: str, points: str = "") -> None:
    (folder / f"{module}.py").write_text(text)
    info = folder / f"{name}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(metadata)
    (info / "entry_points.txt").write_text(points)


def environment(folder: Path, heavy: str | None = "2.0") -> str:
    """The Python of a virtual environment with the requirements of the core, by links, and the package ``heavy``."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in OF_THE_CORE:
        spec = importlib.util.find_spec(name)
        file = Path(spec.origin)
        file = file.parent if file.name == "__init__.py" else file
        (packages / file.name).symlink_to(file)
        info = Path(importlib.metadata.distribution(name).locate_file("")).glob(f"{name}-*.dist-info")
        (packages / f"{name}.dist-info").symlink_to(next(info))
    if heavy is not None:
        distribution(
            packages, "heavy", f"Metadata-Version: 2.1\nName: heavy\nVersion: {heavy}\n", "heavy", "WORD = 'far'"
        )
    return str(folder / "bin" / "python")


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """The light distribution, beside the run only."""
    folder = tmp_path / "beside_the_run"
    folder.mkdir()
    points = "[rlhf.env]\nheavy_env = rlhf_plugin_heavy_env\n"
    distribution(folder, "rlhf_plugin_heavy_env", METADATA, "rlhf_plugin_heavy_env", ADAPTER, points)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    yield Plugins.discover().resolve("env", "heavy_env")
    sys.modules.pop("rlhf_plugin_heavy_env", None)


def play(resolved, python: str, **options) -> tuple[str, EnvStep]:
    async def scenario():
        section = EnvSection(use="x", python=python)
        episodes = Episodes(resolved, resolved.cls.Config(**options) if options else None, section)
        try:
            await episodes.start()
            episode = episodes.open()
            return await episode.reset(ROW, 0), await episode.step("go")
        finally:
            episodes.close()

    return asyncio.run(scenario())


def test_a_package_that_exists_only_there_is_used(adapter, tmp_path) -> None:
    assert importlib.util.find_spec("heavy") is None
    python = environment(tmp_path / "there")
    opening, step = play(adapter, python, times=2)
    assert opening == "farfar"
    prefix = str(tmp_path / "there")
    absent = ["torch", "numpy", "transformers"]
    assert step == EnvStep("none", 1.0, True, info={"prefix": prefix, "program": prefix, "absent": absent})


@pytest.mark.parametrize(
    ("heavy", "problem"), [("1.0", "needs heavy==2.0, found 1.0"), (None, "needs heavy==2.0, which is not installed")]
)
def test_a_missing_package_is_told_at_the_start(adapter, tmp_path, heavy, problem) -> None:
    python = environment(tmp_path / "there", heavy)
    with pytest.raises(
        EnvError, match=rf"bin/python does not meet the plugin's requirements: {problem}\. .*isolate heavy_env"
    ):
        play(adapter, python)


def test_an_empty_environment_is_told_at_the_start(adapter, tmp_path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    with pytest.raises(
        EnvError, match=r"exited with code 1 during starting(.|\n)*has no package '\w+', which rlhf-core"
    ):
        play(adapter, str(tmp_path / "empty/bin/python"))


def test_a_file_and_a_reward_run_there_too(from_file, make_group, tmp_path) -> None:
    text = "def score(prompt, completion, row):\n    import heavy\n    return float(len(heavy.WORD))\n"
    reward, group = from_file("reward", text), make_group("a")
    python = environment(tmp_path / "there")
    score([ActiveReward("far", reward, reward.cls(), python=python)], group)
    assert (group.trajectories[0].reward, group.trajectories[0].error) == (3.0, "")


class Here(Env):
    name = "here"

    def reset(self, row, seed):
        return ""

    def step(self, action):
        return EnvStep(done=True)


def test_what_cannot_have_its_own_python_is_refused_before_the_start(adapter, from_file, tmp_path) -> None:
    async_env = (
        "from rlhf.interfaces import Env\nclass A(Env):\n    async def reset(self, row, seed): return ''\n"
        "    async def step(self, action): pass\n"
    )
    with pytest.raises(ConfigError, match=r"`async def`, which run in the process of the run.*Remove `python`"):
        Episodes(from_file("env", async_env), None, EnvSection(use="x", python=sys.executable))
    with pytest.raises(ConfigError, match=r"no/python' of env 'heavy_env' .* is not an executable file \(looked at /"):
        Episodes(adapter, None, EnvSection(use="x", python="no/python"))
    plugins = Plugins()
    plugins.register("env", Here)
    with pytest.raises(ConfigError, match="is defined in this process"):
        Episodes(plugins.resolve("env", "here"), None, EnvSection(use="x", python=sys.executable))
