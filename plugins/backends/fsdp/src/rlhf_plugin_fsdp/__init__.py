"""Trainer over several ranks: PyTorch FSDP2, and the backend that uses it on a Ray cluster.

Importing this package does not import torch; the hook imports the classes that it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Backend

if TYPE_CHECKING:
    from rlhf.interfaces import Trainer


class FsdpBackend(Backend):
    """The trainer `fsdp` with the launcher `ray` and the generator `vllm`, which are separate distributions."""

    name = "fsdp"
    launcher = "ray"
    trainer = "fsdp"
    generator = "vllm"


@hookimpl
def rlhf_register_trainer() -> list[type[Trainer]]:
    from rlhf_plugin_fsdp.trainer import FsdpTrainer

    return [FsdpTrainer]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    return [FsdpBackend]
