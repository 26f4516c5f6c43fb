"""The message for a reference that names no installed plugin: what is installed, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from packaging.utils import canonicalize_name

from rlhf.errors import did_you_mean
from rlhf.plugins.entry import Entry, distribution_of
from rlhf.plugins.references import Reference
from rlhf.plugins.resolved import IN_PROCESS


def not_found(reference: Reference, entries: Sequence[Entry], how_to_install: Callable[[str], str]) -> str:
    """The message.

    Args:
        entries: all plugins.
        how_to_install: :meth:`rlhf.plugins.Plugins.how_to_install`.
    """
    kind, name, distribution = reference.kind, reference.name, reference.distribution
    if distribution == IN_PROCESS:
        return (
            f"{kind} {reference.text!r} is a function or class of the Python process that started the run, and this "
            "process has no function or class of that name. Pass it to rlhf.train again, or put it into a file and "
            "name the file: 'file:PATH.py'."
        )
    if distribution is not None:
        offered = [e for e in entries if canonicalize_name(e.distribution) == canonicalize_name(distribution)]
        if offered:
            offers = ", ".join(f"{e.kind} {e.name}" for e in offered)
            return f"{distribution} offers no {kind} {name!r}; it offers: {offers}"
        suggestion = did_you_mean(distribution, {e.distribution for e in entries})
        problem = f"{kind} {reference.text!r}: the distribution {distribution} is not installed, or offers no plugins."
        return problem + (suggestion or how_to_install(distribution))
    names = sorted({e.name for e in entries if e.kind == kind})
    line = how_to_install(distribution_of(name))
    installed = f" Installed: {', '.join(names) or 'none'}."
    if reference.options:
        served = f"is served by the plugin {name!r}, which is not installed."
        return f"{kind} {reference.text!r} {served}{installed}{line}"
    text = f"no {kind} named {name!r}.{did_you_mean(name, names)}{installed}"
    if namesakes := [e for e in entries if e.name == name]:
        text += f" {name!r} is of kind {namesakes[0].kind} ({namesakes[0].owner}), not {kind}."
    return text + line
