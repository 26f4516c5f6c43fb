"""Simulated runtime: engines, trainers and environments that take a configured time and compute nothing.

Importing this package does not import torch; the hooks import the classes that they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Backend

if TYPE_CHECKING:
    from rlhf.interfaces import Env, Generator, Launcher, Trainer


class SimulatedBackend(Backend):
    """A runtime without models. Its components take a configured time and compute nothing."""

    name = "simulated"
    launcher = "simulated"
    trainer = "simulated"
    generator = "simulated"


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_simulated.launcher import SimulatedLauncher

    return [SimulatedLauncher]


@hookimpl
def rlhf_register_trainer() -> list[type[Trainer]]:
    from rlhf_plugin_simulated.trainer import SimulatedTrainer

    return [SimulatedTrainer]


@hookimpl
def rlhf_register_generator() -> list[type[Generator]]:
    from rlhf_plugin_simulated.generator import SimulatedGenerator

    return [SimulatedGenerator]


@hookimpl
def rlhf_register_env() -> list[type[Env]]:
    from rlhf_plugin_simulated.env import SimulatedEnv

    return [SimulatedEnv]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    return [SimulatedBackend]
