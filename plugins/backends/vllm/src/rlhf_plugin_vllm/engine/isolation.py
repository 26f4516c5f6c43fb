"""Starting vLLM inside somebody else's process: what it would leave behind is put back, what it would say is not said.

vLLM is written for a process of its own. On its way up it seeds the global random generators, replaces
``torch.set_num_threads`` by a function that does nothing, binds the process's memory to one NUMA node, exports a dozen
environment variables and logs to the terminal.
"""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

LEVEL = "RLHF_VLLM_LOG"
"""Environment variable: vLLM's log level (``INFO``, ``DEBUG``, ...); without it or vLLM's own, errors only."""
KEPT = ("VLLM_", "TORCHINDUCTOR_", "TRITON_")
"""Variables that vLLM reads later on."""


def log_level() -> str:
    return (os.environ.get(LEVEL) or os.environ.get("VLLM_LOGGING_LEVEL") or "ERROR").upper()


@contextmanager
def isolated(variables: Mapping[str, str]) -> Iterator[None]:
    """``variables`` are in the environment inside, of this process and of workers that are started in it."""
    before = dict(os.environ)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    states = random.getstate(), np.random.get_state()
    quiet = {"VLLM_LOGGING_LEVEL": log_level(), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    variables = {**quiet, **variables}
    os.environ.update(variables)
    logging.getLogger("vllm").setLevel(log_level())  # heeded by what is logged before vLLM has set up its own
    try:
        with preserved_random_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        for name in set(before) | set(os.environ):
            if name in variables or not name.startswith(KEPT):
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """vLLM draws from torch's global generators even where every request has its seed: put them back."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def skip_numa_binding() -> None:
    """An engine in this process shares its memory with whoever else computes here: leave it on all NUMA nodes."""
    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]


def disable_small_compiles() -> None:
    """Small functions beside the model are compiled by inductor at their first call, even where the model is not: that
    takes a C++ compiler and seconds. Called before vLLM's other modules are imported, this leaves them as they are."""
    from vllm.platforms import current_platform

    current_platform.simple_compile_backend = "eager"
