"""Information about a plugin before it is imported."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf import hookspecs

HOOK_PREFIX = "rlhf_register_"
KINDS: tuple[str, ...] = tuple(n.removeprefix(HOOK_PREFIX) for n in vars(hookspecs) if n.startswith(HOOK_PREFIX))
"""Names of all kinds, in execution order. They are read from the hooks, so that listing imports no interfaces."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``rlhf plugins list``, from metadata alone."""

    kind: str
    name: str
    distribution: str
    version: str
    module: str
    """The entry point's value: the module that registers the class."""
    status: str = "ok"
    """``ok``, ``needs REQUIREMENT, found VERSION``, or ``conflict with DISTRIBUTION``."""

    @property
    def owner(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.owner})"


def distribution_of(name: str) -> str:
    """Conventional name of a plugin's distribution."""
    return f"rlhf-plugin-{name.replace('_', '-')}"
