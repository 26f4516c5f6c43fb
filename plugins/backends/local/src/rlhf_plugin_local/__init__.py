"""Embedded runtime: torch trainer, transformers generator, everything in one process.

Importing this package does not import torch; the hooks import the classes that they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Backend

if TYPE_CHECKING:
    from rlhf.interfaces import Generator, Launcher, Trainer


class LocalBackend(Backend):
    """Everything in one process: the trainer `torch` and the generator `transformers`."""

    name = "local"
    launcher = "local"
    trainer = "torch"
    generator = "transformers"


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_local.launcher import LocalLauncher

    return [LocalLauncher]


@hookimpl
def rlhf_register_trainer() -> list[type[Trainer]]:
    from rlhf_plugin_local.trainer import TorchTrainer

    return [TorchTrainer]


@hookimpl
def rlhf_register_generator() -> list[type[Generator]]:
    from rlhf_plugin_local.generator import TransformersGenerator

    return [TransformersGenerator]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    return [LocalBackend]
