"""One role computes with another role's output head (:class:`rlhf.types.Lent`). Checked before models are loaded, sent
afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rlhf.errors import TrainingError
from rlhf.types import Lent, RoleSpec

from rlhf_runtime.models.roles import Role


def problems_of(
    lent: Iterable[Lent], roles: Mapping[str, RoleSpec], snapshots: Collection[str], precomputed: Collection[str]
) -> list[str]:
    """Why these heads cannot be lent. The borrower's copy must always equal the lender's head.

    Args:
        snapshots: roles whose weights are replaced during the run.
        precomputed: roles whose models are unloaded before the first step.
    """
    problems = []
    for each in lent:
        if each.role not in roles or each.to not in roles:
            why = f"there is no such role; there are {', '.join(roles)}"
        elif roles[each.role].head != "lm":
            why = f"it has a {roles[each.role].head!r} head, not that of a language model"
        elif roles[each.role].trained or each.role in snapshots:
            why = "its weights change during the run"
        elif each.role in precomputed:
            why = f"{each.role}.precompute = true unloads its model. Remove it"
        else:
            continue
        problems.append(f"{each.to!r} is to compute with the output head of {each.role!r}, but {why}.")
    return problems


def lend(lent: Iterable[Lent], roles: Mapping[str, Role]) -> None:
    """Send each head once: by reference inside this process, otherwise through the launcher's store."""
    for each in lent:
        heads = list(roles[each.role].group.stream("lend_head", roles[each.role].view))
        if len(heads) != 1:
            raise TrainingError(f"role {each.role!r} lent {len(heads)} output heads; its trainer must give one")
        roles[each.to].every("borrow_head", each.role, heads[0])
