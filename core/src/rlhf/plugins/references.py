"""References: the text with which a user selects a plugin of any kind.

=============================  ====================================================================
``math``                       the installed plugin of that name
``plugin:math``                the same
``rlhf-plugin-math/math``      the plugin of that distribution, if several offer the name
``file:reward.py``             the one component that the file defines, without packaging
``file:reward.py:Score``       the class (or, for rewards, function) of that name in the file
``python:package.module:NAME`` the class (or, for rewards, function) of that name in an installed module
``model:PATH``                 rewards only: the plugin ``model`` with the option ``model = "PATH"``
``http://...``                 rewards only: the plugin ``http`` with the option ``urls = ["http://..."]``
=============================  ====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf.errors import ConfigError, did_you_mean
from rlhf.plugins.entry import KINDS

NAME = re.compile(r"[a-z0-9_]+")
_FILE = re.compile(r"(?P<path>.+\.py)(?::(?P<attribute>[A-Za-z_]\w*))?")
_MODULE = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>[^\W\d]\w*)")
_EXAMPLES = "'NAME', 'plugin:NAME', 'DISTRIBUTION/NAME', 'file:PATH.py[:ATTRIBUTE]' or 'python:MODULE:ATTRIBUTE'"
_SCHEME_KINDS = {"model": ("reward",), "http": ("reward",), "https": ("reward",)}


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference."""

    kind: str
    text: str
    scheme: Literal["plugin", "file", "python"]
    name: str = ""
    distribution: str | None = None
    path: str = ""
    """The file, or the module."""
    attribute: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that the reference sets for its plugin."""


def check_kind(kind: str) -> None:
    """Raises ConfigError if ``kind`` is not a kind of plugin."""
    if kind not in KINDS:
        raise ConfigError(
            f"no kind of plugin is called {kind!r}; kinds are {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
        )


def parse_reference(kind: str, text: str) -> Reference:
    """Parse a reference without looking anything up.

    Raises ConfigError: the text has none of the forms above, or a form that this kind does not have.
    """
    check_kind(kind)
    scheme, colon, rest = text.partition(":")
    if not colon:
        return _installed(kind, text, text)
    if scheme == "plugin":
        return _installed(kind, text, rest)
    if scheme == "file":
        match = _FILE.fullmatch(rest)
        if match is None:
            raise ConfigError(f"{kind} {text!r}: expected PATH.py or PATH.py:ATTRIBUTE after 'file:', got {rest!r}")
        return Reference(kind, text, "file", path=match["path"], attribute=match["attribute"])
    if scheme == "python":
        match = _MODULE.fullmatch(rest)
        if match is None:
            raise ConfigError(f"{kind} {text!r}: expected MODULE:ATTRIBUTE after 'python:', got {rest!r}")
        return Reference(kind, text, "python", path=match["module"], attribute=match["attribute"])
    if scheme in _SCHEME_KINDS:
        if kind not in _SCHEME_KINDS[scheme]:
            kinds = " and ".join(_SCHEME_KINDS[scheme])
            raise ConfigError(f"{kind} {text!r}: '{scheme}:' selects only kind {kinds}; write {_EXAMPLES}")
        if not rest.removeprefix("//"):
            raise ConfigError(
                f"{kind} {text!r}: nothing after '{scheme}:'; write 'model:PATH' or 'http://HOST:PORT/PATH'"
            )
        if scheme == "model":
            return Reference(kind, text, "plugin", "model", options={"model": rest})
        return Reference(kind, text, "plugin", "http", options={"urls": [text]})
    if "." in scheme and _MODULE.fullmatch(text):
        raise ConfigError(f"{kind} {text!r} looks like a name in a module: write 'python:{text}'")
    allowed = ("plugin", "file", "python", *(s for s, kinds in _SCHEME_KINDS.items() if kind in kinds))
    raise ConfigError(
        f"{kind} {text!r}: unknown scheme {scheme!r}; allowed are {', '.join(f'{s}:' for s in allowed)}."
        f"{did_you_mean(scheme, allowed)} Write {_EXAMPLES}."
    )


def _installed(kind: str, text: str, rest: str) -> Reference:
    distribution, slash, name = rest.rpartition("/")
    if rest.endswith(".py"):
        raise ConfigError(f"{kind} {text!r} looks like a file: write 'file:{rest}'")
    if not NAME.fullmatch(name) or (slash and (not distribution or "/" in distribution)):
        plain = re.sub(r"[^a-z0-9_]+", "_", name.lower()).strip("_")
        hint = f" Did you mean {plain!r}?" if plain and plain != name and not slash else ""
        raise ConfigError(
            f"{kind} {text!r} is not a plugin's name: names are lower case letters, digits and '_'.{hint} "
            f"Write {_EXAMPLES}."
        )
    return Reference(kind, text, "plugin", name, distribution or None)
