"""Engines with several worker processes. Each worker proves its weights. The death of a worker is reported, whatever
the engine was doing. A closed engine leaves no files and no processes.

The tests kill workers with SIGKILL. Some stop the worker first, so that a call is under way when the worker is killed.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from threading import Thread

import psutil
import pytest
import torch
import worker_forks
from rlhf.errors import ModelError, SyncError, WorkerError
from rlhf.interfaces import ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf.weights.bucket import Bucket
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.engine import engine as engine_module
from rlhf_plugin_vllm.engine.temporary_files import SHARED_MEMORY, TemporaryFiles
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_plugin_vllm.platforms import cores
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

from plugins.backends.vllm.tests.engine_calls import difference, load, sample

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        len(cores()) < 2, reason="tensor parallelism on a CPU takes a core per worker, this machine has one"
    ),
    pytest.mark.full,
]
TWO = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64, tensor_parallel=2)
KILLED = r"engine worker 1 \(process \d+\) was killed by SIGKILL"


@pytest.fixture(scope="module")
def model():
    return model_path("llama", head_dim=32)


@pytest.fixture(scope="module")
def source():
    spec = ModelSpec(RoleSpec("policy"), str(model_path("llama", seed=5, head_dim=32)), dtype="fp32")
    return PlainTrainer(None, spec)


class Kept(TemporaryFiles):
    """Records every object that is made."""

    all: list[TemporaryFiles] = []

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.all.append(self)


@pytest.fixture
def scratches(monkeypatch):
    monkeypatch.setattr(Kept, "all", [])
    monkeypatch.setattr(engine_module, "TemporaryFiles", Kept)
    return Kept.all


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """A folder for temporary files. Its name is short, because paths of sockets must be short; pytest's is too long."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(scope="module")
def server():
    worker_forks.start()


@pytest.fixture
def forked(server, monkeypatch):
    """The workers are forked, to save time. One test below starts its workers in vLLM's own way."""
    from vllm.v1.executor import multiproc_executor

    monkeypatch.setattr(multiproc_executor, "get_mp_context", worker_forks.context)


@pytest.fixture
def two(engines, model, source, forked, scratches, temporary):
    generator = VllmGenerator(TWO, engines.spec(model, sync_timeout=3600.0))
    yield generator
    generator.close()


def in_memory(scratch):
    """Names in /dev/shm that belong to an engine."""
    segments = [SHARED_MEMORY / name for name in scratch._segments]
    return sorted(p.name for p in [*segments, *SHARED_MEMORY.glob(f"{scratch.meeting}*")] if p.exists())


def left_of(old_pids):
    """Command lines of living child processes that are not in ``old_pids``, without Python's resource tracker."""
    new = [p for p in psutil.Process().children(recursive=True) if p.pid not in old_pids]
    left = [" ".join(p.cmdline()) for p in new if p.status() != psutil.STATUS_ZOMBIE]
    return [line for line in left if "resource_tracker" not in line]


def kill_amid(process, call):
    """Stop ``process``, run ``call``, and kill ``process`` a moment later."""
    os.kill(process.pid, signal.SIGSTOP)

    def end():
        time.sleep(1.0)
        process.kill()

    killer = Thread(target=end)
    killer.start()
    try:
        call()
    finally:
        killer.join()


def check_lost(generator, source):
    """Check that every later call reports the death."""
    for call in (
        lambda: list(generator.generate([GenerationRequest((20, 21), 0, Sampling(4))])),
        lambda: generator.logprobs([[20, 21, 22]]),
        lambda: load(generator, source, 9),
    ):
        with pytest.raises(WorkerError, match=KILLED):
            call()
    for process in generator.engine._workers._processes:
        process.join()  # the plugin kills the other worker too
    generator.close()


def test_a_worker_dies_while_it_samples(two, source):
    load(two, source, 1)
    requests = [GenerationRequest((20, 21), n, Sampling(200 if n else 2, ignore_eos=True)) for n in range(4)]
    samples = two.generate(requests)
    assert next(samples)[0] == 0
    process = two.engine._workers._processes[1]
    with pytest.raises(WorkerError, match=KILLED):
        kill_amid(process, lambda: list(samples))
    check_lost(two, source)


def test_a_worker_dies_while_it_takes_weights(two, source, scratches):
    two.begin_load(1)
    assert len(in_memory(scratches[0])) > 2
    first, *_ = source.buckets("live", 2**14)
    process = two.engine._workers._processes[1]
    with pytest.raises(WorkerError, match=KILLED):
        kill_amid(process, lambda: two.take(first))
    assert in_memory(scratches[0]) == [], "removed before the error is raised: the caller may kill this process"
    assert not scratches[0].folder.exists()
    check_lost(two, source)


def test_a_worker_dies_between_two_calls(two, source):
    load(two, source, 1)
    process = two.engine._workers._processes[1]
    process.kill()
    process.join()
    check_lost(two, source)


def test_each_worker_proves_its_weights_and_a_closed_engine_leaves_no_files(
    engines, model, source, scratches, temporary
):
    single = VllmGenerator(engines.small, engines.spec(model))
    load(single, source, 3)
    want = sample(single)
    single.close()
    foreign_files = [SHARED_MEMORY / "vllm_dist_of_another", temporary / "vllm_dist_of_another"]
    for path in foreign_files:
        path.touch()
    old_pids = {p.pid for p in psutil.Process().children(recursive=True)}  # what other tests of this process left
    generator = VllmGenerator(TWO, engines.spec(model))
    try:
        proofs = load(generator, source, 3)
        assert [(p.version, p.receiver) for p in proofs] == [(3, "engine worker 0"), (3, "engine worker 1")]
        assert proofs[0].received == proofs[1].received == source.sent_fingerprints()
        assert difference(generator, source) < 1e-5
        assert sample(generator) == want
        with pytest.raises(
            SyncError, match=r"engine worker 0 did not receive all .*: model\.norm\.weight did not arrive"
        ):
            load(generator, source, 4, lambda b: Bucket(tuple(t for t in b.tensors if t[0] != "model.norm.weight"), ()))
        with pytest.raises(SyncError, match=r"engine worker 0: vLLM cannot load .* is not the policy's"):
            load(generator, source, 4, lambda b: Bucket((("model.strange", torch.zeros(2)), *b.tensors), ()))
        load(generator, source, 5)
        assert difference(generator, source) < 1e-5
        assert sorted(p.name for p in temporary.iterdir()) == [scratches[-1].folder.name, foreign_files[1].name]
        assert len(in_memory(scratches[-1])) > 2
        generator.close()
        assert in_memory(scratches[-1]) == []
        assert list(temporary.iterdir()) == foreign_files[1:]
        assert all(path.exists() for path in foreign_files)
        assert left_of(old_pids) == []
    finally:
        generator.close()
        for path in foreign_files:
            path.unlink()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_cannot_start_leaves_no_files(engines, model, forked, scratches, temporary, tmp_path, workers):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 3000 if file.suffix == ".safetensors" else None])
    config = TWO.model_copy(update={"tensor_parallel": workers})
    old_pids = {p.pid for p in psutil.Process().children(recursive=True)}  # what other tests of this process left
    with pytest.raises(ModelError, match="could not start"):
        VllmGenerator(config, engines.spec(tmp_path))
    assert len(scratches) == 1
    assert in_memory(scratches[0]) == []
    assert list(temporary.iterdir()) == []
    assert left_of(old_pids) == []


def test_the_first_engine_of_a_process_keeps_its_file_for_later_ones(engines, model, source, scratches, temporary):
    """The engines of a process share a process group. It reads the first engine's file until the last engine is
    closed."""
    first, second = (VllmGenerator(engines.small, engines.spec(model)) for _ in range(2))
    first.close()
    assert scratches[0].folder.exists()
    third = VllmGenerator(engines.small, engines.spec(model))
    load(third, source, 1)
    assert third.logprobs([[20, 21, 22]])
    third.close()
    second.close()
    assert list(temporary.iterdir()) == []
