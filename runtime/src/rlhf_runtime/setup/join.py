"""The first step of a run, for launchers that are started as several processes."""

from __future__ import annotations

from rlhf.plugins import Plugins

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.setup.plugins import select


def join(config: RunFile, plugins: Plugins) -> None:
    """Returns in the process that drives the run. In other processes of the same run it ends the process after the run
    (:meth:`rlhf.interfaces.Launcher.join`)."""
    launcher = select(plugins, "launcher", config.launcher, "launcher", config.origins)
    launcher.resolved.cls.join(launcher.config)
