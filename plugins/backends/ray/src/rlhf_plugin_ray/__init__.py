"""The cluster runtime: roles and engines as actors of a Ray cluster.

Importing this package imports neither Ray nor torch; the hook imports what it returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf import hookimpl

if TYPE_CHECKING:
    from rlhf.interfaces import Launcher


@hookimpl
def rlhf_register_launcher() -> list[type[Launcher]]:
    from rlhf_plugin_ray.launcher import RayLauncher

    return [RayLauncher]
