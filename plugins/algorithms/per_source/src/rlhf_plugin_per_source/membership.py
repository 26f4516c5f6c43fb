"""What an algorithm must be like to be a member, and its share of the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import ConfigError
from rlhf.interfaces import Algorithm
from rlhf.types import Update


def check_member(name: str, member: Algorithm) -> None:
    """Raises ConfigError for an algorithm that cannot be a member."""
    needs = member.needs()
    others = sorted(role.name for role in needs.roles if role.trained and role.name != "policy")
    checks = (
        (member.data != "prompts", f"learns from {member.data}; members learn from samples (prompts)"),
        (member.has_members, "has members itself; a member has none"),
        (bool(others), f"trains {', '.join(others)}; members train the policy alone. Use one without a critic"),
        (not needs.reward or needs.given > 0, "learns from samples without a reward; members need one"),
        (bool(needs.lent), "computes with the output head of another role; members cannot"),
    )
    for wrong, why in checks:
        if wrong:
            raise ConfigError(f"member {name!r}: algorithm {member.name!r} {why}")


def planned_update(name: str, member: Algorithm, step: int) -> Update:
    """What a member trains in a step, as planned."""
    return policy_update(name, member, member.updates(step))


def policy_update(name: str, member: Algorithm, updates: Sequence[Any]) -> Update:
    """The one update of the policy that ``updates`` must be. Raises ConfigError for anything else."""
    if len(updates) == 1 and isinstance(updates[0], Update) and updates[0].role == "policy":
        return updates[0]
    names = ", ".join(f"{type(u).__name__}({u.role!r})" for u in updates) or "nothing"
    raise ConfigError(
        f"member {name!r}: algorithm {member.name!r} does {names} in a step; a member does one update of the policy "
        "and copies no weights (leave out kl.snapshot_every, snapshot_every)"
    )


def metrics_of(name: str, members: Sequence[str], metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step as the algorithm reads them where it is alone: its own without its name, those of other
    members left out."""
    own = {}
    for key, value in metrics.items():
        for start in ("policy/loss/", "policy/", ""):
            owner, slash, rest = key.removeprefix(start).partition("/")
            if key.startswith(start) and slash and owner in members:
                if owner == name:
                    own[start + rest] = value
                break
        else:
            own[key] = value
    return own
