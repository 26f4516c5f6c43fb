"""``trainer.deterministic``: fixes the order of sums in the forward and backward passes, also on a GPU.

The backward pass of flash attention adds its gradients in the order in which the blocks of a GPU finish, unless torch
computes deterministically. Some other operations have no deterministic form; torch refuses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rlhf.errors import CapabilityError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that cuBLAS and torch read at the first product of a process."""
FIXED = (":4096:8", ":16:8")
"""Values of :data:`CUBLAS` for which the order of sums is fixed."""


def prepare_determinism(device: torch.device) -> None:
    """Set the environment variable that cuBLAS needs, for this process and its children. Called before a model is
    loaded. Raises CapabilityError if the variable has another value."""
    value = os.environ.setdefault(CUBLAS, FIXED[0]) if device.type == "cuda" else FIXED[0]
    if value not in FIXED:
        raise CapabilityError(
            f"trainer.deterministic needs {CUBLAS} = {' or '.join(FIXED)} in the environment, got {value!r}. Unset the "
            "variable, or remove the option."
        )


@contextmanager
def determinism(chosen: bool) -> Iterator[None]:
    """Context in which torch uses deterministic algorithms if they are ``chosen``. Raises CapabilityError if an
    operation has no deterministic algorithm."""
    if not chosen:
        yield
        return
    settings = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as cause:
        text = str(cause)
        if CUBLAS in text:
            raise CapabilityError(
                f"trainer.deterministic: this process computed a product on the GPU before {CUBLAS} was set. Set it in "
                f"the environment of the run: {CUBLAS}={FIXED[0]}."
            ) from cause
        if "deterministic" not in text:
            raise
        raise CapabilityError(
            f"trainer.deterministic: the model or the loss needs {text.partition(' does not have')[0]}, which has no "
            "deterministic implementation in torch here. Remove the option."
        ) from cause
    finally:
        torch.use_deterministic_algorithms(settings[0], warn_only=settings[1])


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Context in which random numbers of the CPU and of ``device`` start at ``seed``. Afterwards they continue as
    before.

    ``torch.manual_seed`` writes a stack trace for each of three kinds of devices that the process does not use. This
    takes a third of the time of a micro-batch of a tiny model.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        (torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed)(seed)
        yield
