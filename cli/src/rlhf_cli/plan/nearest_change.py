"""The nearest change that makes a run fit, as flags that can be added to the command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rlhf.errors import RlhfError
from rlhf.interfaces import GENERATOR
from rlhf.plugins import Plugins
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import section_path

from rlhf_cli.plan.from_run_file import layout_of, planned_run
from rlhf_cli.plan.layout import RoleLayout
from rlhf_cli.plan.phases import Plan, make_plan

Flags = Mapping[str, str]
"""{dotted flag without dashes: text}."""

FEWEST_TOKENS = 256
"""Smaller micro-batches are not proposed, because they cost much time and save little memory."""
MORE_RANKS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The best change. ``plan`` fits, or lacks the least memory of all tried plans."""

    flags: Flags
    plan: Plan

    @property
    def command(self) -> str:
        return " ".join(f"--{key} {value}" for key, value in self.flags.items())


def nearest(plan: Plan, plugins: Plugins, reload: Callable[[Flags], RunFile]) -> Nearest:
    """Adds changes that lower memory, in the order of their cost in speed, until the run fits. Unnecessary changes are
    then removed.

    Args:
        plan: a plan that does not fit.
        reload: returns the run file with these flags added.
    """

    def attempt(flags: Flags) -> Plan | None:
        try:
            run = planned_run(reload(flags), plugins, plan.layout.machine.device)
            return make_plan(layout_of(run, plan.layout.machine, plan.layout.lengths))
        except RlhfError:  # a plugin refuses the combination
            return None

    best = Nearest({}, plan)
    for flags in levers(plan, plugins, reload({})):
        changes = {**best.flags, **flags}
        candidate = attempt(changes)
        if candidate is not None and candidate.missing < best.plan.missing:
            best = Nearest(changes, candidate)
        if best.plan.fits:
            return _pruned(best, attempt)
    return best


def _pruned(best: Nearest, attempt: Callable[[Flags], Plan | None]) -> Nearest:
    for key in list(best.flags):
        fewer = {k: v for k, v in best.flags.items() if k != key}
        candidate = attempt(fewer)
        if candidate is not None and candidate.fits:
            best = Nearest(fewer, candidate)
    return best


def levers(plan: Plan, plugins: Plugins, config: RunFile) -> Iterable[Flags]:
    """Single changes, those with the lowest cost in speed first."""
    layout = plan.layout
    short = {s.group for s in plan.shortages}
    homes = {g.group.home for g in plan.groups if g.group.title in short}
    names = {name for g in plan.groups if g.group.title in short for name in g.group.holds}
    roles = [r for r in layout.roles if r.name in names]
    ladders = [list(_smaller(role)) for role in roles]
    for ladder in ladders:
        yield from ladder
    if len(ladders) > 1:  # roles that take turns: the phase of either may need the most memory
        for steps in zip(*ladders, strict=False):
            yield {key: value for flags in steps for key, value in flags.items()}
    for role in roles:
        if role.trained and not role.gradient_checkpointing:
            yield {f"{section_path(role.name)}.gradient_checkpointing": "true"}
    if layout.engines is not None and (GENERATOR in names or GENERATOR in short):
        for options in plugins.resolve("generator", config.generator.use).cls.memory_options:
            yield {f"generator.{key}": _text(value) for key, value in options.items()}
    trainer = plugins.resolve("trainer", config.trainer.use).cls
    for options in trainer.memory_options if roles else ():
        yield {f"trainer.{key}": _text(value) for key, value in options.items()}
        for role in roles:
            if (section := config.models.get(section_path(role.name))) and section.trainer:  # they override these
                keys = [key for key in options if role.trained or key not in trainer.training_options]
                yield {f"{section_path(role.name)}.trainer.{key}": _text(options[key]) for key in keys}
    if layout.machine.device == "cuda" and layout.machine.processes and "ranks:many" in trainer.capabilities:
        for factor in MORE_RANKS:
            yield {
                f"placement.{name}.ranks": str(place.ranks * factor)
                for name, place in layout.places.items()
                if (place.share or name) in homes
            }


def _smaller(role: RoleLayout) -> Iterable[Flags]:
    tokens = role.memory.micro_tokens // 2
    while tokens >= max(role.longest, FEWEST_TOKENS):
        yield {f"{section_path(role.name)}.micro_tokens": str(tokens)}
        tokens //= 2


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
