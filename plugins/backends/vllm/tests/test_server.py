"""A real vLLM server: the conformance suite, faults of a sync, a server that was started anew, and a run."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import worker_forks
from rlhf.errors import CapabilityError, ConfigError, ModelError, SyncError
from rlhf.interfaces.model import ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf.weights.bucket import Bucket
from rlhf_engines.server_config import EngineServersConfig
from rlhf_plugin_vllm.server.generator import VllmServerGenerator
from rlhf_testing.generator import GeneratorContract, Sampled
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

from tests.runs import PROMPTS, Workshop

pytestmark = pytest.mark.slow
SIZES = {"head_dim": 32}
FLAGS = {
    "--worker-extension-cls": "rlhf_plugin_vllm.worker.served.ServedWeights",
    "--logprobs-mode": "processed_logprobs",
    "--max-model-len": "257",
}
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(free_port(), tmp_path_factory.mktemp("server") / "log") as address:
        yield address


@contextmanager
def serving(port: int, log: Path, dtype: str = "float32") -> Iterator[str]:
    model = str(model_path("qwen3", **SIZES))
    flags = {**FLAGS, "--model": model, "--host": "127.0.0.1", "--port": str(port), "--dtype": dtype}
    words = [w for flag in flags.items() for w in flag] + ["--enforce-eager", "--no-enable-chunked-prefill"]
    worker_forks.start()
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        process = worker_forks.Worker(worker_forks.serve, {"words": words, "log": log})
        process.start()
    try:
        address = f"http://127.0.0.1:{port}"
        with httpx.Client() as client:  # which reads its certificates once
            while not _answers(client, address):
                assert process.is_alive(), log.read_text()[-3000:]
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.join()


def _answers(client: httpx.Client, address: str) -> bool:
    try:
        return client.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.full
class TestVllmServerGenerator(GeneratorContract):
    generator = VllmServerGenerator
    sizes = SIZES

    @pytest.fixture(autouse=True)
    def _server(self, url: str, engines: Any) -> Iterator[None]:
        self.configs = (EngineServersConfig(urls=(url,)), EngineServersConfig(urls=(url,), requests=1))
        self.spec, self.clients = engines.spec, dict[EngineServersConfig, VllmServerGenerator]()
        yield
        for generator in self.clients.values():
            generator.close()

    def make(self, config: Any, *, eos: Sequence[int] = (1,), architecture: str = "", seed: int = 0) -> Sampled:
        path = self.path(architecture, seed)
        if config not in self.clients:
            self.clients[config] = VllmServerGenerator(config, self.spec(path))
        generator = self.clients[config]
        generator.spec = self.spec(path, eos)
        source = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(path), dtype="fp32"))
        sampled = Sampled(generator, source, generator.spec.decode)
        self.load(sampled, 0)
        return sampled


@pytest.fixture
def source() -> PlainTrainer:
    return PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(model_path("qwen3", seed=3, **SIZES)), dtype="fp32"))


@pytest.fixture
def generator(url: str, engines: Any) -> Iterator[VllmServerGenerator]:
    spec = engines.spec(model_path("qwen3", **SIZES))
    server = VllmServerGenerator(EngineServersConfig(urls=(url,)), spec)
    yield server
    server.close()


def load(generator: VllmServerGenerator, buckets: Sequence[Bucket], version: int = 0) -> Any:
    generator.begin_load(version)
    for bucket in buckets:
        generator.take(bucket)
    return generator.end_load()


def test_a_sync_is_proven_tensor_by_tensor_and_leaves_no_file(generator, source, url):
    buckets = list(source.buckets("live", 5000))
    [proof] = load(generator, buckets)
    marks = {name: mark for b in buckets for (name, _), mark in zip(b.tensors, b.fingerprints, strict=True)}
    assert (proof.receiver, proof.dtype, proof.received) == (url, "fp32", marks)
    assert proof.nbytes == sum(b.nbytes for b in buckets)
    assert proof.peak_memory["process"] > 0
    assert list(generator._folder.path.iterdir()) == []
    assert [name for b in buckets for name in generator.stale(b)] == []
    other = buckets[-1].tensors[0][0]
    variant = Bucket(((other, buckets[-1].tensors[0][1] + 1),), buckets[-1].fingerprints[:1])
    assert generator.stale(variant) == [other]


def test_differences_give_a_bf16_server_the_weights_of_a_whole_sync(source, engines, tmp_path):
    """The head is tied. The server is started anew before version 3, so it gets all weights. Files are corrupted at
    version 5, and the next load of this version is whole."""
    spec = engines.spec(model_path("qwen3", **SIZES))
    port, sizes = free_port(), []
    canaries = [torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
    generator: Any = None

    def sync(version: int) -> dict[str, str]:
        """Compares the tensors in the kernels and the log-probs. Returns the tensors that did not arrive."""
        buckets = list(source.buckets("live", 20_000))
        [proof] = load(generator, buckets, version)
        sizes.append(proof.nbytes)
        trainers = {name: mark for b in buckets for (name, _), mark in zip(b.tensors, b.fingerprints, strict=True)}
        wrong = {name: mark for name, mark in proof.received.items() if trainers[name] != mark}
        if not wrong:
            assert proof.received == trainers
            assert [name for b in buckets for name in generator.stale(b)] == []
            logprobs.append(generator.logprobs(canaries))
        with torch.no_grad():
            for name, tensor in source.module.named_parameters():
                tensor += 2e-4 * torch.randn_like(tensor) * ("k_proj" not in name)
        return wrong

    logprobs: list[Any] = []
    try:
        with serving(port, tmp_path / "log", "bfloat16") as url:
            generator = VllmServerGenerator(EngineServersConfig(urls=(url,), sync="differences"), spec)
            assert [sync(version) for version in (0, 1, 2)] == [{}] * 3
        with serving(port, tmp_path / "log", "bfloat16"):
            assert [sync(version) for version in (3, 4)] == [{}] * 2
            copy, write = [(n, t.clone()) for n, t in source.weights()], generator._sent_weights.write
            generator._sent_weights.write = lambda bucket, path: (write(bucket, path), _corrupt(path))
            assert len(sync(5)) > 0
            source.load_weights(iter(copy))
            generator._sent_weights.write = write
            assert sync(5) == {}
            reference = VllmServerGenerator(EngineServersConfig(urls=(url,)), spec)
            source.load_weights(iter(copy))
            load(reference, list(source.buckets("live", 20_000)), 5)
            assert reference.logprobs(canaries) == logprobs[-1]
            reference.close()
    finally:
        generator.close()
    complete = [sizes[0], sizes[3], sizes[6]]
    assert max(complete) - min(complete) < 100
    assert max(sizes[n] for n in (1, 2, 4, 5)) < min(complete) / 2
    assert logprobs[0] != logprobs[1] != logprobs[2] != logprobs[3]


def _corrupt(path: Path) -> None:
    """Change the first element after a file's header."""
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    path.write_bytes(data)


def test_a_part_of_the_weights_is_refused(generator, source):
    buckets = list(source.buckets("live", 5000))
    with pytest.raises(SyncError, match=r"did not receive all weights of version 0: .* did not arrive"):
        load(generator, buckets[:-1])
    with pytest.raises(ModelError, match="its weights of version 0 are not complete"):
        generator.generate([])
    wrong = Bucket((("model.nothing", buckets[0].tensors[0][1]),), buckets[0].fingerprints[:1])
    with pytest.raises(SyncError, match="worker 0: vLLM cannot load"):
        load(generator, [wrong])


def test_samples_of_a_server_that_has_other_weights_are_not_used(generator, source, url):
    load(generator, list(source.buckets("live", 2**20)))
    requests = [GenerationRequest((20, 21), n, Sampling(5)) for n in range(3)]
    assert len(list(generator.generate(requests))) == 3
    other = VllmServerGenerator(generator.config, generator.spec)
    load(other, list(source.buckets("live", 2**20)))
    other.close()
    with pytest.raises(ModelError, match="no longer holds the weights of version 0"):
        list(generator.generate(requests))


def test_new_weights_read_no_key_of_the_old_ones(generator, source):
    """The prompt fills a block of the cache, which is of 128 tokens on a CPU."""
    prompt = tuple(range(20, 90)) * 2
    request = GenerationRequest(prompt, 1, Sampling(4, ignore_eos=True))
    for seed in (3, 4):
        path = str(model_path("qwen3", seed=seed, **SIZES))
        trainer = PlainTrainer(None, ModelSpec(RoleSpec("policy"), path, dtype="fp32"))
        load(generator, list(trainer.buckets("live", 2**20)))
        [(_, turn)] = generator.generate([request])
        with torch.no_grad():
            rows = trainer.logits(torch.tensor([*prompt, *turn.ids])).log_softmax(1)[len(prompt) - 1 : -1]
        assert turn.logprobs.tolist() == pytest.approx(
            [float(r[t]) for r, t in zip(rows, turn.ids, strict=True)], abs=1e-5
        )


def test_requests_of_others_wait_while_weights_are_loaded(generator, source, url):
    buckets = list(source.buckets("live", 2**20))
    load(generator, buckets)
    body = {"prompt": [20, 21], "max_tokens": 3, "temperature": 0.0}
    with ThreadPoolExecutor(1) as executor:
        generator.begin_load(1)
        answer = executor.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        time.sleep(1)  # long enough for an answer
        assert not answer.done()
        for bucket in buckets:
            generator.take(bucket)
        generator.end_load()
        assert answer.result().status_code == 200


def test_a_folder_that_does_not_exist_is_refused_before_the_start(engines, tmp_path):
    config = EngineServersConfig(urls=("http://node7:8000",), folder=str(tmp_path / "weights"))
    with pytest.raises(ConfigError, match=r"folder = '.*weights' is not a folder of this machine. Create it"):
        VllmServerGenerator.check(config, engines.spec(model_path("qwen3", **SIZES)), (), "cpu")


def test_a_server_that_does_not_answer_or_has_no_extension_is_refused_with_its_command(url, engines):
    spec = engines.spec(model_path("qwen3", **SIZES))
    closed = EngineServersConfig(urls=(f"http://127.0.0.1:{free_port()}",))
    with pytest.raises(CapabilityError, match=r"does not answer.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        VllmServerGenerator(closed, spec)
    with pytest.raises(CapabilityError, match=r"takes sequences of 257 tokens, but the run needs 300"):
        VllmServerGenerator(EngineServersConfig(urls=(url,)), replace(spec, max_tokens=300))


def test_a_run_learns_from_its_samples(url, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    place = Workshop(tmp_path, model_path("qwen3", **SIZES), data)
    finished = place.train("grpo", "run", generator={"use": "vllm_server", "urls": [url]})
    lines = finished.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3]
    assert all(line["sync/canary"] < 1e-5 and line["policy/kl_generator"] < 1e-5 for line in lines)
