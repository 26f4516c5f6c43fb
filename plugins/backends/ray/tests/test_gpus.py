"""The GPUs that each worker sees, in a Ray that was told that it has GPUs. No real GPU is needed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import ray
from ray_paths import PATHS
from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_ray.cluster.connection import OwnProcesses
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher
from worker_standins import OddConfig, OddGenerator, OddTrainer

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module", autouse=True)
def four_gpus(no_cluster: None) -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, OwnProcesses():
        patch.setenv("PYTHONPATH", PATHS, prepend=os.pathsep)
        patch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")  # conftest.py hides all
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        ray.init("local", num_cpus=4, num_gpus=4, object_store_memory=10**8, **options)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def launcher():
    instance = RayLauncher()
    yield instance
    instance.shutdown()


def role(name: str, ranks: int) -> ModelSpec:
    return ModelSpec(RoleSpec(name, trained=True), "", world_size=ranks)


def test_colocated_roles_and_engines_see_the_same_gpus(launcher, tmp_path):
    """The hybrid engine: four ranks, and engines of two GPUs each on the same four."""
    launcher.place({"policy": Place(4), "critic": Place(2, share="policy"), GENERATOR: Place(2, 2, share="policy")})
    devices = {}
    for name, ranks in (("policy", 4), ("critic", 2)):
        group = launcher.launch_trainer(OddTrainer, None, role(name, ranks))
        devices[name] = [w["CUDA_VISIBLE_DEVICES"] for w in group.call("where", [()] * ranks)]
    assert sorted(devices["policy"]) == ["0", "1", "2", "3"]
    assert devices["critic"] == devices["policy"][:2]
    launcher.launch_generator(OddGenerator, OddConfig(folder=str(tmp_path)), GeneratorSpec((0,), str))
    notes = [x.split()[1] for x in (tmp_path / "notes.txt").read_text().splitlines() if x.startswith("sees")]
    assert sorted(notes) == [",".join(devices["policy"][:2]), ",".join(devices["policy"][2:])]


def test_separate_roles_see_separate_gpus(launcher):
    launcher.place({"policy": Place(1, 2), "critic": Place(2)})
    policy = launcher.launch_trainer(OddTrainer, None, role("policy", 1)).call("where", [()])
    critic = launcher.launch_trainer(OddTrainer, None, role("critic", 2)).call("where", [()] * 2)
    devices = [w["CUDA_VISIBLE_DEVICES"] for w in (*policy, *critic)]
    assert [len(s.split(",")) for s in devices] == [2, 1, 1]
    assert sorted(",".join(devices).split(",")) == ["0", "1", "2", "3"]


def test_a_placement_that_does_not_fit_is_refused(launcher):
    with pytest.raises(ConfigError, match=r"(?s)policy  3 ranks x 2 GPUs = 6.*nodes   4 GPUs: 127.0.0.1 has 4"):
        launcher.place({"policy": Place(3, 2)})


def test_an_existing_connection_is_not_replaced():
    for options in ({"cpus": 2}, {"address": "10.0.0.1:6379"}):
        with pytest.raises(
            ConfigError, match=r"this process is already connected to the Ray cluster .*; remove launcher"
        ):
            RayLauncher(RayConfig(**options)).place({"policy": Place()})
    assert ray.is_initialized()
