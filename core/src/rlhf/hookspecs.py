"""The contract: the hooks by which a plugin registers its classes. The hooks of a run come first, in execution order,
and the hooks of the command-line program after them.

Every hook is a *provider*: it returns classes, never instances. It is called once per process, when a run first needs
something from the plugin's module, and only if the plugin was selected. An error in a hook stops the run. A hook must
not use a device, read files or depend on call order. The run picks a class by its name and uses it as a plain typed
object; no hook is called during computation.

Kind K = entry-point group ``rlhf.K`` = hook ``rlhf_register_K`` = ``rlhf.interfaces.K``. A plugin module::

    from rlhf import hookimpl

    @hookimpl
    def rlhf_register_reward():
        return [Brevity]

and in its ``pyproject.toml``::

    [project.entry-points."rlhf.reward"]
    brevity = "my_package"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pluggy import HookspecMarker

if TYPE_CHECKING:
    from rlhf import interfaces as i

hookspec = HookspecMarker("rlhf")


@hookspec
def rlhf_register_algorithm() -> list[type[i.Algorithm]]:  # type: ignore[empty-body]
    """Offer algorithms, selected by ``--algo NAME``. Resolved first, on the driver, because an algorithm declares which
    roles, losses and advantages the run needs."""


@hookspec
def rlhf_register_launcher() -> list[type[i.Launcher]]:  # type: ignore[empty-body]
    """Offer launchers: they start workers. Resolved on the driver before any model is loaded."""


@hookspec
def rlhf_register_trainer() -> list[type[i.Trainer]]:  # type: ignore[empty-body]
    """Offer trainers: they hold one role's model and optimizer. Resolved on the driver and on every rank."""


@hookspec
def rlhf_register_generator() -> list[type[i.Generator]]:  # type: ignore[empty-body]
    """Offer generators: they sample tokens with log-probs. Resolved where sampling happens (online runs only)."""


@hookspec
def rlhf_register_curriculum() -> list[type[i.Curriculum]]:  # type: ignore[empty-body]
    """Offer curricula: they choose the rows that a run trains on next. Resolved on the driver if the run file names
    one."""


@hookspec
def rlhf_register_rollout() -> list[type[i.Rollout]]:  # type: ignore[empty-body]
    """Offer rollouts: how a prompt becomes a trajectory. Resolved on the driver (online runs only)."""


@hookspec
def rlhf_register_env() -> list[type[i.Env]]:  # type: ignore[empty-body]
    """Offer environments for rollouts of several turns. Resolved on the driver, and again in worker processes for
    environments written with plain ``def``."""


@hookspec
def rlhf_register_reward() -> list[type[i.Reward]]:  # type: ignore[empty-body]
    """Offer rewards: ``--reward plugin:NAME``, several with weights. Resolved on the driver, and again in worker
    processes for rewards written with plain ``def``."""


@hookspec
def rlhf_register_advantage() -> list[type[i.Advantage]]:  # type: ignore[empty-body]
    """Offer advantage estimators. Resolved on the driver when the algorithm (or the run file) names one."""


@hookspec
def rlhf_register_loss() -> list[type[i.Loss]]:  # type: ignore[empty-body]
    """Offer losses. Resolved on the driver and on every rank when the algorithm (or the run file) names one."""


@hookspec
def rlhf_register_observer() -> list[type[i.Observer]]:  # type: ignore[empty-body]
    """Offer observers, which a run file lists by name. Resolved last, on the driver. An observer that the run file does
    not list is not imported."""


@hookspec
def rlhf_register_adapter() -> list[type[i.Adapter]]:  # type: ignore[empty-body]
    """Offer adapters for ``file:`` references to files written for another framework. Resolved on the driver and in
    worker processes, only when a ``file:`` defines no component by itself."""


@hookspec
def rlhf_register_backend() -> list[type[i.Backend]]:  # type: ignore[empty-body]
    """Offer backends, selected by ``--backend NAME``. Resolved when the flag is given, before the run file is
    checked."""


@hookspec
def rlhf_register_command() -> list[type[i.Command]]:  # type: ignore[empty-body]
    """Offer commands: subcommands of the program, ``rlhf NAME``. Resolved when a command is called; the others are not
    imported."""


@hookspec
def rlhf_register_check() -> list[type[i.Check]]:  # type: ignore[empty-body]
    """Offer checks of what the plugin uses, for ``rlhf doctor``. Resolved when the command is called; it runs all
    installed checks."""
