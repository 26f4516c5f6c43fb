"""A worker process of an engine on Ray is killed: the engine is replaced, its samples are as they would have been."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rlhf_plugin_ray.cluster.connection import Cluster
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import cores

pytestmark = pytest.mark.full

REQUESTS = [GenerationRequest((20, 21, 22 + n), n, Sampling(5 + 45 * n, ignore_eos=True)) for n in range(6)]
"""The first one ends when most of the others' tokens are still to come."""


class Run:
    """An engine of two workers behind its front, and weights for it."""

    def __init__(self, launcher: RayLauncher) -> None:
        launcher.place({GENERATOR: Place(devices=2)})
        spec = GeneratorSpec((1,), str, str(model_path("llama", head_dim=32)), "fp32", max_tokens=256)
        config = VllmGenerator.Config(kv_cache_gib=0.0625, tensor_parallel=2)
        self.engines = launcher.launch_generator(VllmGenerator, config, spec, refresh=self.load)
        policy = ModelSpec(RoleSpec("policy"), str(model_path("llama", seed=5, head_dim=32)), dtype="fp32")
        self.source, self.loads = PlainTrainer(None, policy), 0

    def load(self) -> None:
        self.loads += 1
        self.engines.begin_load(3)
        for bucket in self.source.buckets("live", 2**16):
            self.engines.take(bucket)
        self.proofs = self.engines.end_load()

    def workers(self) -> list[psutil.Process]:
        engine = psutil.Process(self.engines.pool.members[0].facts["pid"])
        return [p for p in engine.children() if "libtorch_cpu" in Path(f"/proc/{p.pid}/maps").read_text()]

    def drawn(self, after_first=lambda: None) -> dict[int, tuple[list[int], object]]:
        turns = {}
        for position, turn in self.engines.generate(REQUESTS):
            if not turns:
                after_first()
            turns[position] = turn.ids, turn.versions
        return turns


@pytest.fixture
def run():
    cluster = Cluster(RayConfig(cpus=2, object_store_gib=0.25))
    launcher = RayLauncher(RayConfig())
    yield Run(launcher)
    launcher.shutdown()
    cluster.close()


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.skipif(
    len(cores()) < 2, reason="tensor parallelism on a CPU takes a core per worker, this machine has one"
)
def test_a_killed_worker_ends_its_engine_and_no_sample_is_lost(run):
    run.load()
    want = run.drawn()
    assert all(versions == ((0, 3),) for _, versions in want.values())
    first = run.workers()
    assert len(first) == 2
    assert run.drawn(first[1].kill) == want
    assert run.loads == 2
    second = run.workers()
    assert len(second) == 2
    assert not {p.pid for p in first} & {p.pid for p in second}
    assert [(p.version, p.receiver) for p in run.proofs] == [(3, f"engine 0, engine worker {n}") for n in (0, 1)]
