"""The launchers ``processes`` (ranks and engines on one machine) and ``torchrun`` (on several), without Ray.

Importing this package does not import torch; the hook imports what it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Backend, Launcher


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_processes.launcher import ProcessesLauncher
    from rlhf_plugin_processes.torchrun.launcher import TorchrunLauncher

    return [ProcessesLauncher, TorchrunLauncher]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    from rlhf_plugin_processes.backend import ProcessesBackend

    return [ProcessesBackend]
