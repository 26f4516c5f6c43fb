"""The launcher ``processes``: ranks and engines are processes of one machine, without Ray.

Importing this package does not import torch; the hook imports the classes that it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Backend

if TYPE_CHECKING:
    from rlhf.interfaces import Launcher


class ProcessesBackend(Backend):
    """Processes on this machine with the trainer `deepspeed` and the generator `vllm`, which are separate
    distributions."""

    name = "processes"
    launcher = "processes"
    trainer = "deepspeed"
    generator = "vllm"


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_processes.launcher import ProcessesLauncher

    return [ProcessesLauncher]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    return [ProcessesBackend]
