"""Apply flags to a run file's nested tables, and record the origin of every value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rlhf.errors import did_you_mean

from rlhf_runtime.config.data_section import SourceSection
from rlhf_runtime.config.flag_values import NO_VALUE, FlagText, PythonValue, item_of, model_of, toml_value
from rlhf_runtime.config.problems import leaves, origin
from rlhf_runtime.config.runfile import LIST_PATHS, LISTS, SINGLE, RunFile
from rlhf_runtime.config.sections import ROLES, Choice, label_of

RUNTIME = ("launcher", "trainer", "generator")
"""Sections whose plugin may be replaced without dropping its options: the new plugin reads the options of the old one
(every trainer has a learning rate), and refuses those that it does not have."""

Override = tuple[str, str | PythonValue | None]
"""(dotted path, the flag's text, None for a flag without a value, or a Python value)."""


class Overrides:
    """Applies flags. :meth:`apply` changes ``data``, ``origins`` of every path, and ``problems``.

    Args:
        suggest: returns `` Did you mean ...?`` for an unknown flag, or an empty string.
    """

    def __init__(
        self, data: dict[str, Any], origins: Mapping[str, str], suggest: Callable[[str], str] = lambda key: ""
    ) -> None:
        self.data = data
        self._suggest = suggest
        self.origins = dict(origins)
        self.problems: list[str] = []

    def apply(self, overrides: Sequence[Override]) -> None:
        """Apply whole lists first, then ``use``, then single fields, regardless of their order on the command line."""
        lists: dict[str, list[str | PythonValue]] = {}
        fields: dict[str, str | PythonValue | None] = {}
        for key, raw in overrides:
            if raw is None and (key in LIST_PATHS or key in SINGLE or key.endswith(".use")):
                placeholder = "PATH" if key.startswith("data.") else "NAME"
                self.problems.append(f"--{key} needs a value: --{key} {placeholder}.")
            elif raw is not None and key in LIST_PATHS:
                lists.setdefault(key, []).append(raw)
            else:
                fields[f"{key}.use" if key in SINGLE else key] = raw
        for key, texts in lists.items():
            self._replace_list(key, texts)
        # A plugin is selected before its options are set. A short form (`--algorithm.loss NAME`) is set before the
        # options below it, which change it to a table.
        for key in sorted(fields, key=lambda k: (not k.endswith(".use"), k.count("."))):
            self._set(key, fields[key], fields)

    def _replace_list(self, key: str, texts: Sequence[str | PythonValue]) -> None:
        field = LIST_PATHS[key]
        section, _, name = key.rpartition(".")
        parent = self.data.setdefault(section, {}) if section else self.data
        if not isinstance(parent, dict):
            return  # reported when the section is validated
        # The config.toml of a run contains the defaults of its sources, rewards and observers.
        fields = (SourceSection if section else LISTS[key]).model_fields
        defaults = {n: list(f.default) if isinstance(f.default, tuple) else f.default for n, f in fields.items()}
        for i, entry in enumerate(parent.get(name) or ()):
            options = set(entry) - {field} if isinstance(entry, dict) else set()
            extra = sorted(n for n in options if n not in defaults or entry[n] != defaults[n])
            if extra:
                first = f"{key}.{i}.{extra[0]}"
                words = " ".join(text for text in texts if isinstance(text, str))
                self.problems.append(
                    f"--{key} {words} replaces {key}.{i} ({field} = {entry.get(field)!r}), for which "
                    f"{', '.join(extra)} is set{origin(first, self.origins)}. Remove it from the file, or change that "
                    f"entry with --{key}.{i}.{field}."
                )
        entries: list[Any] = []
        for text in texts:
            if isinstance(text, PythonValue):
                values = text.value if isinstance(text.value, list | tuple) else [text.value]
                entries += [
                    {field: v} if isinstance(v, str) else dict(v) if isinstance(v, Mapping) else v for v in values
                ]
                continue
            value = toml_value(text)
            strings = value if isinstance(value, list) and all(isinstance(v, str) for v in value) else [text]
            entries += [{field: str(v)} for v in strings]
        parent[name] = entries
        for path in [p for p in self.origins if p.startswith(f"{key}.")]:
            del self.origins[path]
        self.origins[key] = _origin(key, texts[-1])

    def _set(self, key: str, raw: str | PythonValue | None, flags: Collection[str]) -> None:
        parts = key.split(".")
        if not all(parts):
            self.problems.append(f"--{key}: a flag is a path of names joined by single dots, e.g. --run.seed")
            return
        if _is_section(key):
            self.problems.append(f"--{key}: [{key}] is a section. Set a field of it: --{key}.FIELD VALUE.")
            return
        node, path = self._descend(parts[:-1], key)
        if node is None:
            return
        if isinstance(node, list):
            advice = self._suggest(key) or f" Give a field of one entry, e.g. --{path}.0.{parts[-1]}."
            self.problems.append(f"--{key}: {path} is a list.{advice}")
            return
        last = parts[-1]
        full = f"{path}.{last}" if path else last
        new = raw.value if isinstance(raw, PythonValue) else raw
        if last == "use" and path and isinstance(new, str):
            self._check_replaced(node, path, new, flags)
        if isinstance(raw, PythonValue):
            node[last] = raw.value
        else:
            node[last] = NO_VALUE if raw is None else str(raw) if last == "use" else FlagText(raw)
        self.origins[full] = _origin(key, raw)

    def _descend(self, parts: Sequence[str], key: str) -> tuple[Any, str]:
        node: Any = self.data
        path = ""
        for part in parts:
            if isinstance(node, list):
                index = self._entry(node, part, path, key)
                if index is None:
                    return None, path
                node, part = node[index], str(index)
            else:
                node_path = f"{path}.{part}" if path else part
                if part not in node:
                    node[part] = [] if node_path in LIST_PATHS else {}
                elif isinstance(node[part], str):  # the short form of a plugin or model
                    node[part] = {"model" if node_path in ROLES else "use": str(node[part])}
                node = node[part]
            path = f"{path}.{part}" if path else part
            if not isinstance(node, dict | list):
                self.problems.append(f"--{key}: {path}{origin(path, self.origins)} is a single value, not a section")
                return None, path
        return node, path

    def _entry(self, entries: list[Any], part: str, path: str, key: str) -> int | None:
        numbers = [str(n) for n in range(len(entries) + 1)]  # the last one adds an entry
        if part in numbers:
            if part == numbers[-1]:
                entries.append({})
            return numbers.index(part)
        labels = [_label(e) for e in entries]
        if part in labels:
            return labels.index(part)
        listing = ", ".join(f"{i} ({label})" for i, label in enumerate(labels)) or "none"
        self.problems.append(
            f"--{key}: {path} has no entry {part!r}; its entries are: {listing}.{did_you_mean(part, labels)}"
        )
        return None

    def _check_replaced(self, node: dict[str, Any], path: str, new: str, flags: Collection[str]) -> None:
        old = node.get("use") or _default(path)
        if old is not None and old.removeprefix("plugin:") == new.removeprefix("plugin:"):
            return
        section_fields = _own_fields(path)
        if path in RUNTIME:
            return
        old_fields = [f"{path}.{p}" for p in leaves({k: v for k, v in node.items() if k not in section_fields})]
        for field in old_fields:
            if field not in flags and not self.origins.get(field, "").startswith(("flag", "option")):
                was = f"{old!r}" if old is not None else "the default plugin"
                self.problems.append(
                    f"{field}{origin(field, self.origins)} was set for {was}, which --{path}.use replaces with "
                    f"{new!r}. Remove it from the file, or set it with --{field}."
                )


def _origin(key: str, raw: str | PythonValue | None) -> str:
    """Origin of a value, for messages."""
    return f"option {key!r}" if isinstance(raw, PythonValue) else f"flag --{key}"


def _is_section(key: str) -> bool:
    """Whether a top-level name is a section without a short form as text."""
    field = RunFile.model_fields.get(key)
    if field is None or key in SINGLE or key in LISTS:
        return False
    return model_of(field.annotation) is not None or item_of(field.annotation) is not None


def _label(entry: Any) -> str:
    if not isinstance(entry, dict):
        return ""
    if "path" in entry:
        return str(entry.get("name") or str(entry["path"]).rsplit("/", 1)[-1].split(".")[0])
    return str(entry.get("name") or label_of(str(entry.get("use", ""))))


def _default(path: str) -> str | None:
    field = RunFile.model_fields.get(path)
    default = field.default if field is not None else None
    return default.use if isinstance(default, Choice) else None


def _own_fields(path: str) -> set[str]:
    """Fields of the section itself, which are valid for every plugin."""
    kind = path.split(".")[0]
    section = SINGLE.get(path) or (LISTS.get(kind) if path.count(".") == 1 else None)
    return set(section.model_fields) if section is not None else {"use"}
