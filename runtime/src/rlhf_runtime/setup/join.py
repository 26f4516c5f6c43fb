"""The first step of a run, for launchers that are started as several processes."""

from __future__ import annotations

from rlhf.errors import IntendedExit
from rlhf.plugins import Plugins

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.setup.plugins import select


def join(config: RunFile, plugins: Plugins) -> None:
    """Returns in the process that drives the run. In other processes of the same run it raises IntendedExit after the
    run (:meth:`rlhf.interfaces.Launcher.join`)."""
    launcher = select(plugins, "launcher", config.launcher, "launcher", config.origins)
    try:
        launcher.resolved.cls.join(launcher.config)
    except SystemExit as end:
        raise IntendedExit(end.code) from None
