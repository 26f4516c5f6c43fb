"""Checks of the roles that an algorithm trains, precomputes and lends."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.errors import PluginInvalid
from rlhf.interfaces import Algorithm
from rlhf.types import Update

from rlhf_runtime.config.problems import raise_problems
from rlhf_runtime.models import shared_heads
from rlhf_runtime.models.precompute import problems_of
from rlhf_runtime.setup.plugins import RunPlugins


def check_roles(plugins_of_run: RunPlugins, steps: int, updates: Mapping[str, int], snapshots: frozenset[str]) -> None:
    """Raises ConfigError where a trained role would never be updated, or a role cannot be precomputed or lend its head.

    Args:
        updates: {role: optimizer steps of the whole run}.
        snapshots: roles whose weights the algorithm replaces.
    """
    algorithm, roles = plugins_of_run.algorithm, plugins_of_run.roles
    _check_declared(algorithm, roles, snapshots)
    trained = [name for name, role in roles.items() if role.trained]
    idle = [
        f"{algorithm.name} configured like this updates {name!r} in none of the run's {steps} steps. Raise "
        "--run.steps, or let the training of this role start at an earlier step."
        for name in trained
        if not updates[name]
    ]
    raise_problems("these roles are trained but never updated", idle)
    precomputed = [name for name in roles if plugins_of_run.section(name).precompute]
    raise_problems("these roles cannot be precomputed", problems_of(precomputed, algorithm, trained, snapshots))
    raise_problems(
        "this head cannot be lent", shared_heads.problems_of(algorithm.needs().lent, roles, snapshots, precomputed)
    )


def _check_declared(algorithm: Algorithm, roles: Collection[str], snapshots: Collection[str]) -> None:
    """Raises PluginInvalid where the first step names an undeclared role. Later steps are not checked."""
    updates = [update for update in algorithm.updates(0) if isinstance(update, Update)]
    prepass = [a for update in updates for a in algorithm.parts[update.loss].prepass()]
    role_names = {
        "annotations()": {a.role for a in algorithm.annotations(0)},
        "updates()": {*(update.role for update in updates), *snapshots},
        "prepass() of a loss": {a.role for a in prepass},
    }
    for method, names in role_names.items():
        if unknown := sorted(names - set(roles)):
            raise PluginInvalid(
                f"{method} of algorithm {algorithm.name!r} names the role {unknown[0]!r}, which nothing declares. The "
                f"run has {', '.join(sorted(roles))}. needs() must return Needs(roles=(..., RoleSpec({unknown[0]!r})))."
            )
