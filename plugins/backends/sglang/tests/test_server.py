"""A real SGLang server: the conformance suite, faults of a sync, a server that was started anew, and runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import torch
from rlhf.errors import CapabilityError, ModelError, SyncError
from rlhf.interfaces import GeneratorSpec
from rlhf.interfaces.model import ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf.weights.bucket import Bucket
from rlhf_engines import server_generator
from rlhf_plugin_sglang.generator import SglangServerGenerator, SglangServersConfig
from rlhf_testing.generator import GeneratorContract, Sampled
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer
from transformers import AutoTokenizer

from tests.runs import PROMPTS, Workshop

PYTHON = os.environ.get("RLHF_SGLANG")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="RLHF_SGLANG names no Python with SGLang; cpu_environment.py makes one"),
]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
FLAGS = "--dtype float32 --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph"
LENGTH = 256


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def serving(port: int, log: Path, *flags: str) -> Iterator[str]:
    words = [str(PYTHON), "-m", "sglang.launch_server", *FLAGS.split(), "--enable-deterministic-inference", *flags]
    words += ["--model-path", str(model_path()), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--context-length", str(LENGTH + 2), "--max-total-tokens", "8192"]
    with log.open("w") as file:
        process = subprocess.Popen(words, env=os.environ | ENVIRONMENT, stdout=file, stderr=file)
    try:
        address = f"http://127.0.0.1:{port}"
        while not _answers(address):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(free_port(), tmp_path_factory.mktemp("server") / "log") as address:
        yield address


def specification(eos: Sequence[int] = (1,)) -> GeneratorSpec:
    tokenizer = AutoTokenizer.from_pretrained(str(model_path()))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return GeneratorSpec(tuple(eos), decode, str(model_path()), "fp32", max_tokens=LENGTH)


def trainer(seed: int = 3) -> PlainTrainer:
    return PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(model_path(seed=seed)), dtype="fp32"))


def load(generator: SglangServerGenerator, source: PlainTrainer, version: int = 0, last: int | None = None) -> Any:
    generator.begin_load(version)
    for bucket in list(source.buckets("live", 5000))[:last]:
        generator.take(bucket)
    return generator.end_load()


def logprobs(source: PlainTrainer, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        rows = (source.logits(torch.tensor([*prompt, *ids])) / temperature).log_softmax(1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, ids, strict=True)]


class TestSglangServerGenerator(GeneratorContract):
    generator = SglangServerGenerator
    architectures = ("qwen3",)

    @pytest.fixture(autouse=True)
    def _server(self, url: str) -> Iterator[None]:
        self.configs = (SglangServersConfig(urls=(url,)), SglangServersConfig(urls=(url,), requests=1))
        self.clients = dict[SglangServersConfig, SglangServerGenerator]()
        yield
        for generator in self.clients.values():
            generator.close()

    def test_seeds(self) -> None:
        """Log-probs too are equal bit by bit: of one request at a time, because batches form as requests arrive, and a
        CPU's products of other batches differ in their last bits."""
        self.configs = self.configs[1:]
        super().test_seeds()

    def make(self, config: Any, *, eos: Sequence[int] = (1,), architecture: str = "", seed: int = 0) -> Sampled:
        if config not in self.clients:
            self.clients[config] = SglangServerGenerator(config, specification())
        generator = self.clients[config]
        generator.spec = specification(eos)
        sampled = Sampled(generator, trainer(seed), generator.spec.decode)
        self.load(sampled, 0)
        return sampled


@pytest.fixture
def generator(url: str) -> Iterator[SglangServerGenerator]:
    server = SglangServerGenerator(SglangServersConfig(urls=(url,)), specification())
    yield server
    server.close()


def test_a_sync_is_proven_tensor_by_tensor_and_leaves_no_file(generator, url):
    source = trainer()
    [proof] = load(generator, source)
    assert (proof.receiver, proof.dtype, proof.received) == (url, "fp32", source.sent_fingerprints())
    assert proof.peak_memory["process"] > 0
    assert list(generator._folder.path.iterdir()) == []
    buckets = list(source.buckets("live", 5000))
    assert proof.nbytes == sum(b.nbytes for b in buckets)
    assert [name for b in buckets for name in generator.stale(b)] == []
    for n, (name, tensor) in enumerate(buckets[1].tensors):
        assert generator.stale(Bucket(((name, tensor + 1),), buckets[1].fingerprints[n : n + 1])) == [name]


def test_missing_unknown_and_corrupted_tensors_are_found(generator, monkeypatch):
    source = trainer()
    with pytest.raises(SyncError, match=r"did not receive all weights of version 0: a part of model.* did not arrive"):
        load(generator, source, last=-1)
    with pytest.raises(ModelError, match="its weights of version 0 are not complete"):
        generator.generate([])
    name, tensor = next(source.weights())
    for bad, message in (
        (("model.nothing", tensor), "does not take the tensors model.nothing"),
        ((name, tensor[:2, :2]), f"cannot load one of the received tensors {name}"),
    ):
        generator.begin_load(0)
        with pytest.raises(SyncError, match=message):
            generator.take(Bucket((bad,), ("0",)))

    write = server_generator.write_bucket

    def corrupt(bucket: Bucket, path: Path) -> None:
        """Change the first element after the file's header."""
        write(bucket, path)
        data = bytearray(path.read_bytes())
        data[8 + int.from_bytes(data[:8], "little")] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(server_generator, "write_bucket", corrupt)
    [proof] = load(generator, source)
    assert {name for name, mark in proof.received.items() if source.sent_fingerprints()[name] != mark}


def test_differences_give_the_weights_of_a_whole_sync(url):
    generator = SglangServerGenerator(SglangServersConfig(urls=(url,), sync="differences"), specification())
    source, sizes = trainer(), []
    for version in range(3):
        [proof] = load(generator, source, version)
        sizes.append(proof.nbytes)
        assert proof.received == source.sent_fingerprints()
        assert [name for b in source.buckets("live", 5000) for name in generator.stale(b)] == []
        with torch.no_grad():
            source.module.model.embed_tokens.weight[version] += 1
    generator.close()
    assert max(sizes[1:]) < sizes[0] / 4


def test_samples_do_not_depend_on_neighbours_and_their_logprobs_are_those_of_the_distribution(generator):
    source, prompt = trainer(), (20, 21, 22, 23)
    load(generator, source)
    requests = [
        GenerationRequest(prompt, 2**63 + 5, Sampling(12, ignore_eos=True)),
        GenerationRequest(prompt, 5, Sampling(12, temperature=0.0, ignore_eos=True)),
        GenerationRequest(prompt, 5, Sampling(12, temperature=0.7, top_k=3, ignore_eos=True)),
        GenerationRequest(prompt[1:], 5, Sampling(12, top_p=0.6, ignore_eos=True)),
        GenerationRequest(prompt, 5, Sampling(200, temperature=0.005, ignore_eos=True)),
        GenerationRequest(prompt, 5, Sampling(LENGTH - 4, ignore_eos=True)),
    ]
    turns = dict(generator.generate(requests))
    for n, request in enumerate(requests):
        [(_, single)] = generator.generate([request])
        assert single.ids == turns[n].ids
        assert len(single.ids) == request.sampling.max_new_tokens
        if not 0 < n < 4:
            expected = logprobs(source, prompt, single.ids, request.sampling.temperature or 1.0)
            assert single.logprobs.tolist() == pytest.approx(expected, abs=2e-5 / request.sampling.temperature)


def test_a_sample_ends_at_its_own_end_tokens_only(generator):
    """The server ends at its model's end token 1 in every request that names end tokens."""
    load(generator, trainer())
    requests = [GenerationRequest((20, 21), seed, Sampling(40, ignore_eos=True)) for seed in range(100)]
    seed, reference = next(
        (n, turn)
        for n, turn in sorted(generator.generate(requests), key=itemgetter(0))
        if 1 in turn.ids[:20] and turn.ids[20] != 1
    )
    for eos, ignore_eos in (((reference.ids[20],), False), ((1,), True), ((1, reference.ids[20]), False)):
        generator.spec = specification(eos)
        stop = (reference.ids[20],) if ignore_eos else ()
        sampling = Sampling(40, stop_token_ids=stop, ignore_eos=ignore_eos)
        ends = {*stop, *(() if ignore_eos else eos)}
        first = next(n for n, token in enumerate(reference.ids) if token in ends)
        [(_, turn)] = generator.generate([GenerationRequest((20, 21), seed, sampling)])
        assert (turn.ids, turn.finish) == (reference.ids[: first + 1], "stop")


def test_samples_of_a_server_that_has_other_weights_are_not_used(generator):
    load(generator, trainer())
    requests = [GenerationRequest((20, 21), n, Sampling(5)) for n in range(3)]
    assert len(list(generator.generate(requests))) == 3
    other = SglangServerGenerator(generator.config, generator.spec)
    load(other, trainer())
    other.close()
    with pytest.raises(ModelError, match="no longer holds the weights of version 0"):
        list(generator.generate(requests))


def test_requests_of_others_wait_while_weights_are_loaded_and_go_on_with_them(generator, url):
    """One is under way: each of its tokens has the log-prob of the old weights or of the new ones, in this order, and
    no key of the old ones is read after the load."""
    old, new, prompt = trainer(3), trainer(4), [20, 21]
    load(generator, old)
    sampling = {"max_new_tokens": LENGTH - 4, "ignore_eos": True, "temperature": 1.0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "stream": True}

    def answer(begun: Event) -> Any:
        with httpx.stream("POST", f"{url}/generate", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    begun.set()
                    last = json.loads(line.removeprefix("data: "))
        return last

    begun, other = Event(), Event()
    with ThreadPoolExecutor(2) as executor:
        running = executor.submit(answer, begun)
        assert begun.wait(60)
        with pytest.raises(SyncError, match="keeps keys and values of the old weights: there are unfinished requests"):
            generator._call("rlhf_start", None)  # without a pause
        generator.begin_load(1)
        waiting = executor.submit(answer, other)
        time.sleep(2)  # long enough for both answers
        assert not running.done()
        assert not other.is_set()
        for bucket in new.buckets("live", 5000):
            generator.take(bucket)
        generator.end_load()
        answers = [running.result(), waiting.result()]
    counts = []
    for last in answers:
        values = [value for value, _, _ in last["meta_info"]["output_token_logprobs"]]
        old_matches, new_matches = (
            [abs(a - b) < 1e-4 for a, b in zip(values, logprobs(s, prompt, last["output_ids"]), strict=True)]
            for s in (old, new)
        )
        count = next(n for n in range(len(values) + 1) if all(new_matches[n:]))
        assert all(old_matches[:count])
        counts.append(count)
    assert 0 < counts[0] < LENGTH - 4
    assert counts[1] == 0


def test_keys_are_asked_for_and_a_server_that_was_started_anew_is_found(tmp_path, monkeypatch):
    port, keys = free_port(), ("--api-key", "reader", "--admin-api-key", "writer")
    monkeypatch.setenv("READER", "reader")
    monkeypatch.setenv("WRITER", "writer")
    config = SglangServersConfig(urls=(f"http://127.0.0.1:{port}",), token_env="READER", admin_token_env="WRITER")
    requests = [GenerationRequest((20, 21), 1, Sampling(5))]
    with serving(port, tmp_path / "log", *keys):
        for option in ("token_env", "admin_token_env"):
            with pytest.raises(CapabilityError, match=r"HTTP status 401.*Set generator.token_env"):
                SglangServerGenerator(config.model_copy(update={option: None}), specification())
        generator = SglangServerGenerator(config, specification())
        load(generator, trainer())
        assert len(list(generator.generate(requests))) == 1
    with serving(port, tmp_path / "log", *keys):
        with pytest.raises(ModelError, match=r"was restarted.*Continue with --resume"):
            list(generator.generate(requests))
        load(generator, trainer())
        assert len(list(generator.generate(requests))) == 1
    generator.close()


def test_servers_that_cannot_be_used_are_refused(url):
    closed = SglangServersConfig(urls=(f"http://127.0.0.1:{free_port()}",))
    with pytest.raises(CapabilityError, match=r"does not answer.*sglang.launch_server"):
        SglangServerGenerator(closed, specification())
    with pytest.raises(
        CapabilityError, match=r"takes sequences of 256 tokens, but the run needs 257.*--context-length 259"
    ):
        SglangServerGenerator(SglangServersConfig(urls=(url,)), replace(specification(), max_tokens=LENGTH + 1))


def test_a_run_learns_from_its_samples_and_is_resumed_exactly(url, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    place, generator = Workshop(tmp_path, model_path(), data), {"use": "sglang_server", "urls": [url]}
    reference = place.train("grpo", "whole", generator=generator)
    lines = reference.lines()
    assert [line["sync/version"] for line in lines] == [1, 2, 3]
    assert all(line["sync/canary"] < 1e-5 and line["policy/kl_generator"] < 1e-5 for line in lines)
    place.train("grpo", "parts", generator=generator, run={"steps": 1})
    parts = place.train("grpo", "parts", "--resume", generator=generator)
    assert parts.weights == reference.weights
