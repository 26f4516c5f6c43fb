"""The cluster runtime: roles and engines as actors of a Ray cluster.

Importing this package imports neither Ray nor torch; the hook imports what it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Backend, Check, Launcher


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_ray.launcher import RayLauncher

    return [RayLauncher]


@hookimpl
def rlhf_register_backend() -> list[type[Backend]]:
    from rlhf_plugin_ray.backend import RayBackend

    return [RayBackend]


@hookimpl
def rlhf_register_check() -> list[type[Check]]:
    from rlhf_plugin_ray.checks.check import RayCheck

    return [RayCheck]
