"""Which option of a run a name may mean that nothing reads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property

from pydantic import BaseModel
from rlhf.errors import RlhfError
from rlhf.plugins import Plugins

from rlhf_runtime.config.flag_values import item_of, model_of
from rlhf_runtime.config.other_frameworks import OTHER_NAMES
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import Choice

ROLES = ("policy", "critic", "reference")
PLACES = ("policy", "generator")
"""What ``[placement.NAME]`` is suggested for."""
WHOLE = ("reward", "observer", "data.train", "data.eval")
"""Flags that stand for a list of sections."""
LIKE = 0.75
"""Least likeness of a name that is found elsewhere than in the section where it was written."""
MOST = 3
"""Suggestions in one message."""

Chosen = Collection[tuple[str, str, Choice]]
"""(kind, section, plugin) of the plugins that a run selects."""


class Suggestions:
    """Made for one run; nothing is imported until the first question.

    Args:
        chosen: the selected plugins. Options of one that cannot be imported are not known.
    """

    def __init__(self, plugins: Plugins, chosen: Chosen) -> None:
        self._plugins, self._chosen = plugins, chosen

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Dotted paths of all options of the run."""
        found = [*WHOLE, *_leaves(RunFile, "")]
        for kind, where, choice in self._chosen:
            found += self._of_plugin(kind, where, choice)
        return tuple(dict.fromkeys(found))

    def near(self, path: str, allowed: Iterable[str], flag: bool) -> str:
        """`` Did you mean ...?``, or an empty string.

        Args:
            path: the dotted name that nothing reads.
            allowed: names that its section reads.
            flag: whether it was given as a flag; so the suggestions are too.
        """
        section, _, key = path.rpartition(".")
        found, exact = self._elsewhere(path.replace("-", "_"))
        here = (
            [] if exact or (found and not section) else difflib.get_close_matches(key, list(allowed), n=1, cutoff=0.6)
        )
        if here and not found:
            return f" Did you mean {here[0]!r}?"
        found = [*(f"{section}.{name}" for name in here), *(found or self._like(key))]
        shown = [f"--{name}" if flag else name for name in dict.fromkeys(found)]
        return f" Did you mean {' or '.join(shown[:MOST])}?" if shown else ""

    def _elsewhere(self, path: str) -> tuple[list[str], bool]:
        """Options by the longest end of ``path`` that another framework calls them by, or that is theirs; and whether
        it is the former."""
        parts = path.split(".")
        for start in range(len(parts)):
            end = ".".join(parts[start:])
            if known := [name for name in OTHER_NAMES.get(end, ()) if name in self.options]:
                return known, True
            ours = [o for o in self.options if o == end or o.endswith(f".{end}")]
            ours = [o for o in ours if o != path and _of_role(o) in ("", parts[0])]
            if ours:
                return sorted(ours, key=lambda o: (_of_role(o) == "", o.count("."))), False
        return [], False

    def _like(self, key: str) -> list[str]:
        names = {o.rpartition(".")[2] for o in self.options} | {n for n in OTHER_NAMES if "." not in n}
        near = difflib.get_close_matches(key.replace("-", "_"), sorted(names), n=1, cutoff=LIKE)
        return self._elsewhere(near[0])[0] if near else []

    def _of_plugin(self, kind: str, where: str, choice: Choice) -> Iterator[str]:
        try:
            cls = self._plugins.resolve(kind, choice.use).cls
        except RlhfError:
            return
        yield f"{where}.use"
        own = list(_leaves(cls.Config, f"{where}."))
        yield from own
        if kind == "trainer":
            yield from (f"{role}.{option}" for role in ROLES for option in own)
        for name, slot in getattr(cls, "slots", {}).items():
            given = choice.options.get(name)
            given = given.get("use") if isinstance(given, Mapping) else given
            part = Choice(use=str(given or slot.use))
            yield from self._of_plugin(slot.kind, f"{where}.{name}", part)


def _of_role(option: str) -> str:
    """The role that an option is about, where it is suggested to who wrote that role's name only."""
    role = option.partition(".")[0]
    return role if role in ROLES[1:] or (role in ROLES and ".trainer." in option) else ""


def _leaves(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """Dotted paths of the fields below a section; of a list's entries those of the first."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        inner, item = model_of(field.annotation), item_of(field.annotation)
        if path in SINGLE or path in LISTS:
            section = SINGLE.get(path) or LISTS[path]
            at = f"{path}.0" if path in LISTS else path
            yield from (f"{at}.{own}" for own in section.model_fields if own != "options")
        elif path == "placement" and item is not None:
            yield from (f"{path}.{place}.{own}" for place in PLACES for own in item[1].model_fields)
        elif inner is not None:
            yield from _leaves(inner, f"{path}.")
        elif item is not None and model_of(item[1]) is not None and item[0] is not dict:
            yield from _leaves(item[1], f"{path}.0.")
        else:
            yield path
