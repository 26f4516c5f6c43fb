"""The cluster runtime: roles and engines as actors of a Ray cluster.

Importing this package imports neither Ray nor torch; the hook imports the classes that it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Backend

if TYPE_CHECKING:
    from rlhf.interfaces import Check, Launcher


class RayBackend(Backend):
    """A Ray cluster with the trainer `deepspeed` and the generator `vllm`, which are separate distributions."""

    name = "ray"
    launcher = "ray"
    trainer = "deepspeed"
    generator = "vllm"


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_ray.launcher import RayLauncher

    return [RayLauncher]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    return [RayBackend]


@hookimpl
def rlhf_register_check() -> list[type[Check]]:
    from rlhf_plugin_ray.checks.check import RayCheck

    return [RayCheck]
