"""Starts vLLM inside a process that also does other work. Restores global state that vLLM changes, and limits its
logging.

vLLM expects a separate process. At its start it seeds the global random generators, replaces ``torch.set_num_threads``
by a function that does nothing, binds the process's memory to one NUMA node, sets the precision of fp32 products and a
dozen environment variables, and logs to the terminal. On a GPU it replaces the thread's stream, at the start or in a
later call, and keeps using its own.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

LEVEL = "RLHF_VLLM_LOG"
"""Environment variable with vLLM's log level (``INFO``, ``DEBUG``, ...). If neither it nor vLLM's own variable is set,
only errors are logged."""
PRODUCTS = "TRITON_F32_DEFAULT"
"""Triton's environment variable for the precision of fp32 products in kernels that do not set it. It is a part of the
names under which Triton keeps compiled kernels."""
KEPT_PREFIXES = ("VLLM_", "TORCHINDUCTOR_", "TRITON_")
"""Prefixes of variables that are not restored, because vLLM reads them later."""


def log_level() -> str:
    return (os.environ.get(LEVEL) or os.environ.get("VLLM_LOGGING_LEVEL") or "ERROR").upper()


@contextmanager
def isolated(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which ``variables`` are set in the environment of this process and of workers that it starts.
    Afterwards random states, the number of threads, the environment and the state of :func:`engine_state` are as
    before."""
    old_environment = dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    quiet = {"VLLM_LOGGING_LEVEL": log_level(), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables = {**quiet, **variables}
    os.environ.update(variables)
    logging.getLogger("vllm").setLevel(log_level())  # for messages before vLLM configures its own logging
    try:
        with engine_state(), preserved_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        for name in set(old_environment) | set(os.environ):
            if name in variables or not name.startswith(KEPT_PREFIXES):
                if name in old_environment:
                    os.environ[name] = old_environment[name]
                else:
                    os.environ.pop(name, None)


@dataclass(frozen=True, slots=True)
class TorchState:
    """The state of torch that vLLM changes and keeps using."""

    stream: torch.cuda.Stream | None
    """The stream of this thread; None if CUDA is not in use."""
    products: str | None
    """``torch.get_float32_matmul_precision``; None if the process mixed torch's two ways to set it."""
    backends: tuple[str, ...]
    """The precision of fp32 products of each of :func:`_backends`."""

    @classmethod
    def current(cls) -> TorchState:
        try:
            products = torch.get_float32_matmul_precision()
        except RuntimeError:
            products = None
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        return cls(stream, products, tuple(backend.fp32_precision for backend in _backends()))

    def replace(self, other: TorchState) -> None:
        """Make this the current state, replacing ``other``. Later work is ordered after earlier work."""
        if (self.products, self.backends) != (other.products, other.backends):
            if self.products is not None:
                torch.set_float32_matmul_precision(self.products)
            for backend, precision in zip(_backends(), self.backends, strict=True):
                backend.fp32_precision = precision
        if other.stream is not None:
            stream = self.stream or torch.cuda.default_stream()
            if stream != other.stream:
                stream.wait_stream(other.stream)
                torch.cuda.set_stream(stream)


_of_engines: TorchState | None = None
"""The state in which vLLM's last call left torch. All engines of a process share it, as they share vLLM's modules."""


@contextmanager
def engine_state() -> Iterator[None]:
    """Context in which torch is in the state in which vLLM left it. Afterwards it is in the caller's state again."""
    global _of_engines
    caller_state = TorchState.current()
    if _of_engines is not None:
        _of_engines.replace(caller_state)
    try:
        yield
    finally:
        _of_engines = TorchState.current()
        caller_state.replace(_of_engines)


def _backends() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore torch's global random states, because vLLM draws from them even if every request has a seed."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def skip_numa_binding() -> None:
    """Keep vLLM from binding this process's memory to one NUMA node, because other work in the process shares it."""
    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]


def disable_small_compiles() -> None:
    """Keep vLLM from compiling small helper functions with inductor. It does so even for an uncompiled model, which
    needs a C++ compiler and seconds. Must be called before vLLM's other modules are imported."""
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"


def use_exact_products() -> None:
    """Make Triton's kernels of this process, and of workers that it starts, multiply fp32 numbers in fp32. On GPUs vLLM
    computes attention in fp32 with a Triton kernel, whose products are in TF32 by default. Log-probs would then differ
    from the trainer's by more than ``sync.tolerance`` allows.

    Kernels are compiled when they are first used, so the variable stays set. A value set by the user has priority.
    """
    os.environ.setdefault(PRODUCTS, "ieee")
