"""A resolved plugin pickles as its reference, never as code.

The process that unpickles it resolves the same kind, name, distribution and version again, and refuses another version.
A file is pickled as its text and SHA-256.
"""

from __future__ import annotations

import copyreg
from dataclasses import replace
from typing import Any

from rlhf.plugins.registry import Plugins
from rlhf.plugins.resolved import FILE, Resolved


def _reduce(plugin: Resolved) -> tuple[Any, ...]:
    """The function to call when unpickling, and its arguments."""
    options = dict(plugin.options)
    if plugin.distribution == FILE:
        return _resolve_text, (plugin.kind, plugin.ref, plugin.path, plugin.text, options)
    if plugin.version:
        return _resolve_same, (plugin.manifest(), plugin.ref, options)
    # registered in process: its class must be importable there
    fields = (plugin.kind, plugin.name, plugin.cls, plugin.distribution, plugin.version, plugin.ref, plugin.sha256)
    return Resolved, (*fields, options)


copyreg.pickle(Resolved, _reduce)


def _resolve_same(item: dict[str, str], ref: str, options: dict[str, Any]) -> Resolved:
    plugins = Plugins.discover()
    plugins.verify([item])
    plugin = plugins.resolve(item["kind"], f"{item['distribution']}/{item['name']}")
    return replace(plugin, ref=ref, options=options)


def _resolve_text(kind: str, ref: str, path: str, text: str, options: dict[str, Any]) -> Resolved:
    return replace(Plugins.discover().resolve_text(kind, ref, path, text), options=options)
