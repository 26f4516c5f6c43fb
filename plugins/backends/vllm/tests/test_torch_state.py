"""What vLLM changes in torch stays with vLLM: the stream, the precision of fp32 products."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
from rlhf.weights.bucket import Bucket
from rlhf_plugin_vllm.engine import global_state
from rlhf_plugin_vllm.engine.global_state import engine_state
from torch import nn


@pytest.fixture(autouse=True)
def unused(monkeypatch):
    """No engine has run in this process; the precision of products is restored."""
    monkeypatch.setattr(global_state, "_of_engines", None)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


def test_vllm_and_its_caller_keep_their_own_precision_of_products():
    torch.set_float32_matmul_precision("high")
    with engine_state():
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")  # as a worker of vLLM does
    assert torch.get_float32_matmul_precision() == "high"
    with engine_state():
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_a_precision_that_torch_cannot_name_is_restored_too():
    torch.set_float32_matmul_precision("highest")
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # torch refuses to name this mixture
        with engine_state():
            torch.set_float32_matmul_precision("highest")
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")


class Stream:
    def __init__(self, name):
        self.name, self.waited = name, []

    def wait_stream(self, other):
        self.waited.append(other.name)


class Cuda:
    """A stand-in for torch's streams: each thread has a current one, at first the default stream."""

    def __init__(self):
        self.default, self.of_threads = Stream("default"), threading.local()

    def current_stream(self, device=None):
        return getattr(self.of_threads, "stream", self.default)

    def set_stream(self, stream):
        self.of_threads.stream = stream

    @contextmanager
    def stream(self, stream):
        old_stream = self.current_stream()
        self.set_stream(stream or old_stream)
        yield
        self.set_stream(old_stream)


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    for name in ("current_stream", "set_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: cuda.default)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    return cuda


def test_with_a_stand_in_for_streams_vllm_and_its_caller_keep_their_own_stream(cuda):
    engine_stream = Stream("vllm")
    with engine_state():
        torch.cuda.set_stream(engine_stream)  # as vLLM does before it captures a graph, also in a later call
    assert cuda.current_stream() is cuda.default
    assert cuda.default.waited == ["vllm"], "later work of the caller is ordered after vLLM's"
    with engine_state():
        assert cuda.current_stream() is engine_stream
        assert engine_stream.waited == ["default"], "vLLM's work is ordered after the caller's"
    assert cuda.current_stream() is cuda.default


def test_with_a_stand_in_for_streams_the_stream_is_restored_after_an_error(cuda):
    @engine_state()
    def fail():
        torch.cuda.set_stream(Stream("vllm"))
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert cuda.current_stream() is cuda.default


def test_with_a_stand_in_for_streams_tensors_are_hashed_on_the_stream_that_loads_them(cuda, monkeypatch):
    from rlhf_plugin_vllm.worker.reload import Reload  # here, because it imports vLLM, which takes seconds

    hashed = []

    def received(bucket):
        hashed.append((cuda.current_stream().name, threading.current_thread() is threading.main_thread()))
        return {name: "" for name, _ in bucket.tensors}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2, bias=False)

        def load_weights(self, weights):
            return {name for name, _ in weights}

    monkeypatch.setattr(Bucket, "received", received)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    torch.cuda.set_stream(Stream("vllm"))
    Reload(Model(), None).take(Bucket((("linear.weight", torch.ones(2, 2)),), ("",)))
    assert hashed == [("vllm", False)]
