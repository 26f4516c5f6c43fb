"""Fixtures of the tests of whole runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model

from tests.runs import PROMPTS, Say, Workshop


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Models and data, made once."""
    folder = tmp_path_factory.mktemp("workshop")
    workshop = Workshop(folder, tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1), folder / "data.jsonl")
    workshop.rows("data.jsonl", PROMPTS)
    return workshop


@pytest.fixture
def shop(tiny: Workshop, tmp_path) -> Workshop:
    """The shared models, and a folder of one test for everything else."""
    return Workshop(tmp_path, tiny.model, tiny.data)


@pytest.fixture(scope="module")
def place(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A folder and a model for runs with vLLM, whose attention on a CPU needs heads of size 32 or more."""
    folder = tmp_path_factory.mktemp("place")
    return Workshop(folder, tiny_model(folder / "tiny", hidden=32, heads=2, kv_heads=1, head_dim=32), tiny.data)


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """``say(*words)``: ``rlhf WORDS`` in this process."""

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(w) for w in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def two_cpus() -> Iterator[None]:
    """A Ray on this machine only, started with two CPUs, for all runs of a module in this process."""
    pytest.importorskip("ray")
    from rlhf_plugin_ray.cluster.connection import Cluster
    from rlhf_plugin_ray.config import RayConfig

    cluster = Cluster(RayConfig(cpus=2, object_store_gib=0.25))
    yield
    cluster.close()
