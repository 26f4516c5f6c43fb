"""What is known of a plugin before it is imported (Entry) and after (Resolved)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf import hookspecs

HOOK_PREFIX = "rlhf_register_"
KINDS: tuple[str, ...] = tuple(n.removeprefix(HOOK_PREFIX) for n in vars(hookspecs) if n.startswith(HOOK_PREFIX))
"""Names of all kinds, in execution order, read off the hooks so that listing need not import the interfaces."""

IN_PROCESS = "in process"
"""The distribution of a class given to :meth:`rlhf.plugins.Plugins.register`."""
FILE = "file"
"""The distribution of a class taken from a ``file:`` reference."""


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
        """Distribution and version, as messages name them."""
        return f"{self.distribution} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({self.owner})"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A plugin's class, imported and checked, with where it came from.

    Pickles as its reference: the process that unpickles it resolves the same kind, name, distribution and version
    again (a file travels as text with its SHA-256), and refuses another version. Nothing is sent as code objects.
    """

    kind: str
    name: str
    cls: type[Any]
    distribution: str
    version: str
    ref: str
    """The reference as the user wrote it."""
    sha256: str = ""
    """Of the file's bytes; empty for installed plugins."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the reference itself sets: ``model:PATH`` is the plugin ``model`` with ``{"model": PATH}``."""
    path: str = ""
    """The file of a ``file:`` reference."""
    text: str = field(default="", repr=False)
    """Its source, as read."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} ({f'{self.distribution} {self.version}'.strip()})"

    def manifest(self) -> dict[str, str]:
        """What identifies this plugin in a run's ``manifest.json``."""
        item = {"kind": self.kind, "name": self.name, "distribution": self.distribution, "version": self.version}
        if self.distribution == FILE:
            item |= {"ref": self.ref, "sha256": self.sha256}
        return item

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.version and self.distribution != FILE:  # registered in process: its class must be importable there
            fields = (self.kind, self.name, self.cls, self.distribution, self.version, self.ref, self.sha256)
            return Resolved, (*fields, dict(self.options))
        if self.distribution == FILE:
            return _resolve_text, (self.kind, self.ref, self.path, self.text, dict(self.options))
        return _resolve_same, (self.manifest(), self.ref, dict(self.options))


def _resolve_same(item: dict[str, str], ref: str, options: dict[str, Any]) -> Resolved:
    from rlhf.plugins.registry import Plugins

    plugins = Plugins.discover()
    plugins.verify([item])
    found = plugins.resolve(item["kind"], f"{item['distribution']}/{item['name']}")
    return replace(found, ref=ref, options=options)


def _resolve_text(kind: str, ref: str, path: str, text: str, options: dict[str, Any]) -> Resolved:
    from rlhf.plugins.registry import Plugins

    return replace(Plugins.discover().resolve_text(kind, ref, path, text), options=options)
