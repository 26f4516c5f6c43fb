"""The models of a run, each loaded where the launcher puts it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from rlhf.interfaces import Launcher, ModelSpec

from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.shared_heads import lend
from rlhf_runtime.setup.plugins import base_of, section_of
from rlhf_runtime.setup.prepare import Prepared


def launch_roles(
    prepared: Prepared,
    launcher: Launcher,
    precomputed: Callable[[ModelSpec, Callable[[], Role]], Role] | None = None,
) -> dict[str, Role]:
    """Load every role's model where the launcher puts it.

    Args:
        precomputed: (spec, what loads its model) -> the role, for those of which the run file asks it. They come first,
            so that their models are gone when others are loaded.
    """
    config = prepared.config
    found: dict[str, Role] = {}
    launcher.place(prepared.places, prepared.plugins)
    if "generator" in prepared.parts:
        launcher.choose_link(prepared.parts["generator"].resolved.cls, config.sync.transport)
    for name in sorted(prepared.specs, key=lambda name: not section_of(config, name).precompute):
        load = functools.partial(_launch_role, name, prepared, launcher)
        if section_of(config, name).precompute and precomputed is not None:
            found[name] = precomputed(prepared.specs[name], load)
        else:
            found[name] = _base_of(name, prepared, found) or load()
    roles = {name: found[name] for name in prepared.specs}
    lend(prepared.algorithm.needs().lent, roles)
    return roles


def _launch_role(name: str, prepared: Prepared, launcher: Launcher) -> Role:
    trainer, spec = prepared.parts.get(f"trainer.{name}", prepared.parts["trainer"]), prepared.specs[name]
    group = launcher.launch_trainer(trainer.resolved.cls, trainer.config, spec)
    return Role(spec, group, section_of(prepared.config, name).micro_tokens)


def _base_of(name: str, prepared: Prepared, roles: Mapping[str, Role]) -> Role | None:
    """A frozen role that starts as another role's model is that model without its adapters, where it trains some."""
    declared = {each: spec.role for each, spec in prepared.specs.items()}
    source = roles.get(base_of(prepared.config, declared, prepared.places, name) or "")
    if source is None or name in prepared.schedule.snapshots or "base" not in source.facts.views:
        return None
    return Role(prepared.specs[name], source.group, source.budget, view="base")
