"""Suggestions of options for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

from rlhf.errors import RlhfError
from rlhf.plugins import Plugins

from rlhf_runtime.config.options import Option, plugin_options, run_file_options
from rlhf_runtime.config.other_frameworks import OTHER_NAMES
from rlhf_runtime.config.runfile import LIST_PATHS
from rlhf_runtime.config.sections import ROLES, Choice

PLACES = ("policy", "generator")
"""Names for which ``[placement.NAME]`` is suggested."""
LIKE = 0.75
"""Smallest similarity for names from other sections than the section of the unknown name."""
MAX_NAMES = 3
"""Largest number of suggestions in one message."""

Chosen = Collection[tuple[str, str, Choice]]
"""(kind, section, plugin) of the plugins that a run selects."""


class Suggestions:
    """Suggestions for one run. Nothing is imported until the first call.

    Args:
        choices: the selected plugins. Options of a plugin that cannot be imported are not suggested.
    """

    def __init__(self, plugins: Plugins, choices: Chosen) -> None:
        self._plugins, self._choices = plugins, choices

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Dotted paths of all options of the run."""
        paths = [*LIST_PATHS, "roles"]
        for path in (option.path for option in run_file_options()):
            if path.startswith("placement.NAME."):
                paths += [path.replace("NAME", place) for place in PLACES]
            elif not path.startswith("roles.NAME."):
                paths.append(path)
        for kind, section, choice in self._choices:
            paths += self._plugin_paths(kind, section, choice)
        return tuple(dict.fromkeys(paths))

    def suggest(self, path: str, allowed: Iterable[str], flag: bool) -> str:
        """`` Did you mean ...?``, or an empty string.

        Args:
            path: the unknown dotted name.
            allowed: names in its section.
            flag: whether the name is a flag. The suggestions are then flags too.
        """
        section, _, key = path.rpartition(".")
        if not section and (options := self._values.get(key.replace("-", "_"))):
            return f" Did you mean {' or '.join(f'--{option} {key}' for option in options[:MAX_NAMES])}?"
        matches, exact = self._match_end(path.replace("-", "_"))
        close_names = (
            [] if exact or (matches and not section) else difflib.get_close_matches(key, list(allowed), n=1, cutoff=0.6)
        )
        if close_names and not matches:
            return f" Did you mean {close_names[0]!r}?"
        matches = [*(f"{section}.{name}" for name in close_names), *(matches or self._like(key))]
        absent = () if matches else OTHER_NAMES.get(key.replace("-", "_"), ())
        names = [f"--{name}" if flag else name for name in dict.fromkeys([*matches, *absent])]
        if absent:
            return (
                f" The corresponding option is {' or '.join(names[:MAX_NAMES])}, which the plugins of this run do not "
                "have."
            )
        return f" Did you mean {' or '.join(names[:MAX_NAMES])}?" if names else ""

    @cached_property
    def _values(self) -> dict[str, list[str]]:
        """{value: the options of the algorithm that allow it}. Some options of other frameworks have the name of a
        value."""
        options: dict[str, list[str]] = {}
        for kind, section, choice in self._choices:
            if kind == "algorithm":
                for option in self._options(kind, section, choice) or ():
                    for value in option.allowed:
                        options.setdefault(value, []).append(option.path)
        return options

    def _match_end(self, path: str) -> tuple[list[str], bool]:
        """Options for the longest end of ``path`` that is a name in another framework or the name of an option, and
        whether it is a name in another framework."""
        parts = path.split(".")
        for start in range(len(parts)):
            end = ".".join(parts[start:])
            if end in OTHER_NAMES:
                matches = [name for name in OTHER_NAMES[end] if name in self.options]
                if matches or not start:
                    return matches, True
            options = [o for o in self.options if o == end or o.endswith(f".{end}")]
            options = [o for o in options if o != path and _of_role(o) in ("", parts[0])]
            if options:
                return sorted(options, key=lambda o: (_of_role(o) == "", o.count("."))), False
        return [], False

    def _like(self, key: str) -> list[str]:
        names = {o.rpartition(".")[2] for o in self.options} | {n for n in OTHER_NAMES if "." not in n}
        matches = difflib.get_close_matches(key.replace("-", "_"), sorted(names), n=1, cutoff=LIKE)
        return self._match_end(matches[0])[0] if matches else []

    def _options(self, kind: str, section: str, choice: Choice) -> list[Option] | None:
        """None: the plugin cannot be imported."""
        try:
            return plugin_options(self._plugins, kind, section, choice, skip_broken=True)
        except RlhfError:
            return None

    def _plugin_paths(self, kind: str, section: str, choice: Choice) -> Iterator[str]:
        options = self._options(kind, section, choice)
        if options is None:
            return
        yield f"{section}.use"
        yield from (option.path for option in options)
        if kind == "trainer":
            yield from (f"{role}.{option.path}" for role in ROLES for option in options)


def _of_role(option: str) -> str:
    """The role of an option that is suggested only for names that contain that role."""
    role = option.partition(".")[0]
    return role if role in ROLES[1:] or (role in ROLES and ".trainer." in option) else ""
