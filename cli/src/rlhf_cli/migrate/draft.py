"""The run file to write: its values, the origin of each, and the outcome for the other options."""

from __future__ import annotations

import re
import tempfile
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, PluginError
from rlhf.plugins import Plugins
from rlhf_runtime.config.components import chosen_by, option_problems
from rlhf_runtime.config.load import load
from rlhf_runtime.config.options import plugin_options, run_file_options
from rlhf_runtime.config.runfile import LISTS, RunFile
from rlhf_runtime.config.suggestions import Chosen

from rlhf_cli.migrate.rows import FrameworkOptions
from rlhf_cli.options.run_file import BY_NAME, WIDTH, toml

COLUMN = 40
"""Column at which comments begin."""
OBSERVERS = ("wandb", "tensorboard", "mlflow")
INVERSE_SQRT = (
    "without a warm-up, inverse_sqrt of transformers falls over 10,000 steps; here it falls at once. Give a "
    "warm-up, or the schedule constant"
)
"""Why transformers' schedule has no equivalent without a warm-up."""


@dataclass
class Draft:
    """A run file that is being built."""

    source: FrameworkOptions
    values: dict[str, Any] = field(default_factory=dict)
    """{our option: value}."""
    causes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """{our option: the options that its value comes from}."""
    notes: dict[str, str] = field(default_factory=dict)
    """{our option: note}."""
    unread: dict[str, str] = field(default_factory=dict)
    """{option of the other framework that has no effect in this run: why}."""
    remarks: list[str] = field(default_factory=list)
    """Messages about what the user has to do."""
    conditions: set[str] = field(default_factory=set)
    """The conditions of ``OptionRow.when`` that the run meets."""

    def set(self, path: str, value: Any, *names: str, note: str = "") -> None:
        """Set an option.

        Args:
            names: the options that the value comes from.
        """
        self.values[path], self.causes[path] = value, names
        if note:
            self.notes[path] = note

    def copy(self, path: str, name: str, *names: str) -> None:
        """Set an option to the value of ``name``."""
        self.set(path, self.source[name], name, *names)

    def observers(self, names: Collection[str], option: str) -> list[str]:
        """Set the observers with these names. Returns those that exist."""
        observers = [name for name in names if name in OBSERVERS]
        for name in names:
            if name not in observers:
                remark = f"{option} {name}: rlhf has no such observer. metrics.jsonl has every metric; available are "
                self.remarks.append(remark + ", ".join(OBSERVERS))
        for number, name in enumerate(observers):
            self.set(f"observer.{number}.use", name, option)
        return observers

    def take(self, conditions: Mapping[str, tuple[Any, str]]) -> None:
        """Set all options that need no rule: unchanged values, and values that the table translates.

        Args:
            conditions: {condition: (whether the run meets it, why an option has no effect without it)}.
        """
        self.conditions = {name for name, (holds, _) in conditions.items() if holds}
        for row in self.source.rows.values():
            if row.when and row.when not in self.conditions:
                self.unread[row.name] = conditions[row.when][1]
            elif row.to and not row.rule:
                value = self.source[row.name]
                if row.values and value is not None:
                    value = self.source.one_of(row.name, row.values)
                for path in row.to if value not in (None, "", [], row.unset) else ():
                    self.set(path, value, row.name)

    def text(self, plugins: Plugins) -> str:
        """The run file. Raises ConfigError if it would not be accepted."""
        if self.source.unknown:
            self.remarks.append(
                f"rlhf does not know these options, which belong to another version of {self.source.framework} or to "
                f"the project's own code: {', '.join(self.source.unknown)}. This file contains nothing from them"
            )
        self._remove_liger()
        remarks = [*self.source.remarks, *self.remarks, *self._earlier()]
        if "policy.model" not in self.values and not any(remark.startswith("name the model") for remark in remarks):
            remarks.insert(0, "name the model: policy.model")
        run = _load("\n".join(self._tables(self.values)))
        chosen = [choice for choice in chosen_by(run) if not _absent_file(choice[2].use)]
        if problems := option_problems(plugins, chosen, run.origins):
            raise ConfigError("\n".join(["these options produce a run file that is not accepted:", *problems]))
        defaults = self._defaults(chosen, plugins)
        changes = {path: value for path, value in self.values.items() if not _equal(value, defaults.get(path))}
        lines = [
            *_comment(f"A run of {self.source.framework}, {self.source.origin}, for rlhf."),
            *_comment(
                "The comments name the options that values come from. `rlhf train FILE --dry-run` checks this file."
            ),
            *(line for remark in remarks for line in _comment(f"To do: {remark}.")),
            *self._tables(changes),
            *self._comments_on_rest(changes),
        ]
        return "\n".join(lines) + "\n"

    def _remove_liger(self) -> None:
        """Remove the kernels of liger where a run does not support them."""
        if self.values.get("trainer.kernels") != "liger":
            return
        reason = ""
        if self.values.get("policy.storage") == "bf16":
            reason = "liger supports only fp32 weights of norms, and they are bf16 here"
        elif self.values.get("trainer.use") == "fsdp":
            reason = "liger needs whole layers, and the trainer fsdp divides them"
        if reason:
            del self.values["trainer.kernels"]
            names = self.causes.pop("trainer.kernels")
            self.unread |= dict.fromkeys(names, f"{reason}; results do not depend on it")

    # ---------------------------------------------------------------------------------------- tables

    def _tables(self, values: Mapping[str, Any]) -> Iterator[str]:
        for section in RunFile.model_fields:
            entries: dict[str, list[str]] = {}
            for path in values:
                place, _, name = path.partition(".")
                if place == section:
                    entry = name.partition(".")[0] if place in LISTS or place in BY_NAME else ""
                    entries.setdefault(entry, []).append(path)
            for entry, paths in entries.items():
                head = f"{section}.{entry}." if entry else f"{section}."
                heading = f"[[{section}]]" if section in LISTS else f"[{head.rstrip('.')}]"
                yield from ["", heading]
                for path in sorted(paths, key=lambda path: not path.endswith(f"{head}use")):
                    yield from self._lines(path, path.removeprefix(head), values[path])

    def _lines(self, path: str, name: str, value: Any) -> Iterator[str]:
        line, comment = f"{name} = {toml(value)}", self._origin(path)
        if not comment:
            yield line
        elif len(line) < COLUMN and COLUMN + len(comment) + 4 <= WIDTH:
            yield f"{line.ljust(COLUMN)}  # {comment}"
        else:
            yield from [*_comment(comment), line]

    def _origin(self, path: str) -> str:
        origins = [self.source.user_values[n].text for n in self.causes[path] if n in self.source.user_values]
        if not origins and self.causes[path]:
            origins = [f"{self.source.framework}'s default of {self.causes[path][0]}"]
        return ", ".join(dict.fromkeys(origins)) + (
            f" ({note})" if origins and (note := self.notes.get(path)) else self.notes.get(path, "")
        )

    # -------------------------------------------------------------------------------------- comments

    def _comments_on_rest(self, changes: Collection[str]) -> Iterator[str]:
        """Comments about the options from which no value of the file comes."""
        names_of_changes = {name for path in changes for name in self.causes[path]}
        paths = {name: path for path, names in self.causes.items() if path not in changes for name in names}
        groups: dict[str, list[str]] = {"The default here too:": [], "No counterpart, or no effect in this run:": []}
        equal, different = groups.values()
        for name, source_option in self.source.user_values.items():
            row = self.source.rows[name]
            if name in names_of_changes:
                continue
            if name in paths:
                equal.append(f"{source_option.text}: {paths[name]} = {toml(self.values[paths[name]])}")
            else:
                rule = "" if row.rule.startswith("refused") else row.rule
                reason = self.unread.get(name) or row.why or row.doc or rule or "off by default here too"
                different.append(f"{_shortened(source_option.text)}: {reason}")
        groups["Unknown:"] = [_shortened(text) for text, _ in self.source.unknown.values()]
        for title, lines in groups.items():
            if lines:
                yield from ["", *_comment(title)]
                for line in dict.fromkeys(lines):
                    yield from textwrap.wrap(
                        line,
                        WIDTH,
                        initial_indent="#   ",
                        subsequent_indent="#     ",
                        break_long_words=False,
                        break_on_hyphens=False,
                    )

    def _earlier(self) -> Iterator[str]:
        """A note about options that are not set and had another default in earlier versions."""
        rows = [row for row in self.source.rows.values() if row.earlier and row.name not in self.source.user_values]
        if changes := [f"{row.name} {row.earlier}" for row in rows if row.name not in self.unread]:
            yield (
                f"if the source was written for an older {self.source.framework} or a fork, set the defaults of that "
                f"version: {', '.join(changes)}"
            )

    def _defaults(self, chosen: Chosen, plugins: Plugins) -> dict[str, Any]:
        """Our defaults of the options that are set, as far as the plugins are installed."""
        options = run_file_options()
        for kind, path, choice in chosen:
            try:
                options += plugin_options(plugins, kind, path, choice, skip_broken=True)
            except PluginError:
                continue
        option_defaults = {option.path: option.default for option in options if not option.required}
        general = {path: option_defaults.get(_general(path)) for path in self.values}
        defaults = {path: default for path, default in general.items() if default is not None}
        for path in self.values:
            _, _, option = path.partition(".trainer.")
            if option:  # [trainer] applies to every role
                defaults[path] = self.values.get(f"trainer.{option}", option_defaults.get(f"trainer.{option}"))
            if _general(path) == "placement.NAME.ranks" and f"{path.removesuffix('ranks')}share" not in self.values:
                defaults[path] = 1
        defaults.pop("sampling.samples_per_prompt", None)  # it depends on the algorithm
        return defaults


def _general(path: str) -> str:
    """``placement.policy.ranks`` as ``placement.NAME.ranks``, the form in which options of named tables are listed."""
    section, _, rest = path.partition(".")
    return f"{section}.NAME.{rest.partition('.')[2]}" if section in BY_NAME else path


def _equal(value: Any, default: Any) -> bool:
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return list(value) == list(default)
    # In Python True == 1, but `true` is no number in a run file.
    return default is not None and isinstance(value, bool) == isinstance(default, bool) and bool(value == default)


def with_unique_names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sources of rows. They get names if their files have the same name (``gsm8k/train``, ``math/train``)."""
    stems = [Path(source["path"]).stem for source in sources]
    folders = [Path(source["path"]).parent.name for source in sources]
    return [
        {**source, "name": f"{folder}_{stem}"} if stems.count(stem) > 1 else source
        for source, stem, folder in zip(sources, stems, folders, strict=True)
    ]


def _absent_file(reference: str) -> bool:
    """Whether a component is in a file that is not on this machine."""
    kind, _, path = reference.partition(":")
    return kind == "file" and not Path(re.sub(r":\w+$", "", path)).is_file()


def _load(text: str) -> RunFile:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text, encoding="utf-8")
        try:
            return load(str(file))
        except ConfigError as error:
            message = str(error).replace(str(file), "run.toml")
            raise ConfigError(f"these options produce a run file that is not accepted:\n{message}") from None


def _shortened(text: str) -> str:
    return textwrap.shorten(text, 300, placeholder=" ...") if len(text) > 300 else text


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
