"""The tables of other frameworks' options, and the options of one command line read by such a table."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from rlhf.errors import ConfigError, did_you_mean

TYPES = {bool: "switch", int: "integer", float: "number", str: "text", list: "numbers"}
"""{class of a default: type of the option}."""

SECRET = re.compile(r"api_?key|wandb_key|secret|passw|(?:^|[._]|hf_|hub_|auth_|access_)token$")
"""Names of options whose values are never written."""


@dataclass(frozen=True)
class OptionRow:
    """The conversion of one option. The head of a table's file explains the fields."""

    name: str
    to: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    default: Any = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    type: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    rule: str = ""
    doc: str = ""
    unset: Any = None
    when: str = ""
    why: str = ""
    secret: bool = False
    earlier: str = ""


@cache
def table(framework: str) -> Mapping[str, Sequence[OptionRow]]:
    """The rows of a framework by group."""
    text = files("rlhf_cli.migrate").joinpath(f"{framework}.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)
    ignored = {group: rows.pop("ignored", {}) for group, rows in groups.items()}
    return {
        group: [
            *(_row(name, row) for name, row in rows.items()),
            *(OptionRow(name, type="any", why=reason) for reason, names in ignored[group].items() for name in names),
        ]
        for group, rows in groups.items()
    }


def _row(name: str, fields: dict[str, Any]) -> OptionRow:
    targets = fields.pop("to", ())
    fields["to"] = (targets,) if isinstance(targets, str) else tuple(targets)
    fields["old"] = tuple(fields.get("old", ()))
    examples = [fields["default"]] if "default" in fields else list(fields.get("defaults", {}).values())
    fields.setdefault("type", TYPES[type(examples[0])] if examples else "text")
    return OptionRow(name, **fields)


def rows_of(groups: Mapping[str, Iterable[OptionRow]], names: Sequence[str]) -> dict[str, OptionRow]:
    """The rows of these groups by name; a later group replaces a row of an earlier one."""
    return {row.name: row for name in names for row in groups[name]}


def matching(
    rows: Mapping[str, OptionRow], name: str, location: str, groups: Mapping[str, Iterable[OptionRow]]
) -> list[OptionRow]:
    """The rows for an option's name. An older name may have several rows. Raises ConfigError if there is no row.

    A row ``NAME.*`` applies to every option below NAME that has no row itself. The returned row has the option's
    name."""
    matches = [rows[name]] if name in rows else [row for row in rows.values() if name in row.old]
    if not matches:
        tops = [(top, row) for row in rows.values() for top in (row.name, *row.old) if top.endswith(".*")]
        matches = [replace(row, name=name, old=()) for top, row in tops if name.startswith(top[:-1])]
    if not matches:
        names = [other for row in rows.values() for other in (row.name, *row.old)]
        is_of_others = any(name in (row.name, *row.old) for group in groups.values() for row in group)
        reason = "is an option of other entry points, not of this one" if is_of_others else "is unknown"
        raise ConfigError(f"{location}: the option {name} {reason}.{did_you_mean(name, names)}")
    return matches


def value_of(row: OptionRow, texts: Sequence[str], location: str) -> Any:
    """The value of an option from its words. Raises ConfigError if they do not have its type."""
    text = texts[0] if len(texts) == 1 else None
    try:
        match row.type:
            case "switch" if not texts:
                return True
            case "switch" if text is not None and text.lower() in ("true", "false", "1", "0", "yes", "no"):
                return text.lower() in ("true", "1", "yes")
            case "integer" if text is not None:
                return int(text)
            case "number" if text is not None:
                return float(text)
            case "numbers" if texts:
                return [float(text) for text in texts]
            case "text" if text is not None:
                return text
            case "texts" if texts:
                return list(texts)
            case "any":
                return list(texts)
            case "table" if text is not None and isinstance(fields := json.loads(text), dict):
                return fields
    except ValueError:
        pass
    raise ConfigError(f"{location}: the option {row.name} takes {row.type}, got {' '.join(texts) or 'nothing'}")


def typed(row: OptionRow, value: Any, location: str) -> Any:
    """The value of an option from a value of YAML or Python. None stays None, which does not mean the default."""
    match row.type:
        case _ if value is None or row.type == "any":
            return value
        case "switch" if isinstance(value, bool):
            return value
        case "integer" if isinstance(value, int) and not isinstance(value, bool):
            return value
        case "number" if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        case "table" if isinstance(value, dict):
            return value
        case "texts" | "numbers":
            values = value if isinstance(value, list | tuple) else [value]
            return value_of(row, [str(item) for item in values], location) if values else []
        case "text" if isinstance(value, str | bool | int | float):
            return value if isinstance(value, str) else str(value)
    if isinstance(value, str):  # YAML reads 1e-6 as a text
        return value_of(row, [value], location)
    raise ConfigError(f"{location}: {row.name} takes {row.type}, got {value!r}")


@dataclass(frozen=True)
class OptionValue:
    """An option as it was written."""

    value: Any
    text: str
    """``--actor.adam.lr 1e-6``."""
    location: str
    """``run.sh, line 3``."""


@dataclass
class FrameworkOptions:
    """The options of one run in another framework: the options that are set, and the framework's defaults.

    Args:
        framework: name of the framework, for messages.
        groups: all rows of the framework.
        rows: rows of the entry point, by name.
        entry: the entry point, which determines the defaults.
    """

    framework: str
    groups: Mapping[str, Sequence[OptionRow]]
    rows: dict[str, OptionRow]
    entry: str
    user_values: dict[str, OptionValue] = field(default_factory=dict)
    unknown: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{option without a row: (option as it was written, error)}."""
    problems: list[str] = field(default_factory=list)
    """Errors about options that could not be read."""
    remarks: list[str] = field(default_factory=list)
    """Messages for the user about other contents of the source."""
    origin: str = ""
    """The source of the options, for the first line of the run file."""
    processes: int = 1
    """Number of processes that the launcher starts, if the framework counts per process."""

    def __getitem__(self, name: str) -> Any:
        if name in self.user_values:
            return self.user_values[name].value
        row = self.rows.get(name)
        return None if row is None else row.defaults.get(self.entry, row.default)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Record an error, so that the next option is read too."""
        try:
            yield
        except ConfigError as error:
            self.problems.append(str(error))

    def give(
        self,
        name: str,
        value: Any,
        text: str,
        location: str,
        convert: Callable[[OptionRow, Any, str], Any] = typed,
    ) -> None:
        """Set the options that a name stands for. An unknown name is recorded, and so is the error of a wrong value.

        Args:
            text: the option as it was written.
            convert: returns the value for a row: :func:`typed`, or :func:`value_of` for the words of a command.
        """
        try:
            rows = matching(self.rows, name, location, self.groups)
        except ConfigError as error:
            self.unknown[name] = name if SECRET.search(name) else text, str(error)
            return
        label = f"{'--' if text.startswith('--') else ''}{name} ..."
        with self.reading():
            for row in rows:
                option = OptionValue(convert(row, value, location), label if row.secret else text, location)
                self.rows[row.name], self.user_values[row.name] = row, option

    def replace(self, settings: Mapping[str, str]) -> None:
        """Set options to the values of ``--set``, where ``null`` means none. Raises ConfigError for a name that no
        option has."""
        for name, text in settings.items():
            flag = f"--set {name}={text}"
            self.give(name, None if text == "null" else text, flag, flag)
            if name in self.unknown:
                raise ConfigError(self.unknown[name][1])

    def check(self, allow_unknown: bool) -> None:
        """Raise ConfigError with everything that could not be read, and with all unknown options."""
        problems = dict.fromkeys(self.problems)
        if self.unknown and not allow_unknown:
            problems |= dict.fromkeys(error for _, error in self.unknown.values())
            problems["--allow-unknown lists such options in the file, as remaining work"] = None
        if problems:
            raise ConfigError("\n".join(problems))

    def refuse_by_table(self) -> None:
        """Raise ConfigError for a value that the table refuses: any value except the default, in rows whose rule says
        so."""
        for name, option in self.user_values.items():
            row = self.rows[name]
            if row.rule.startswith("refused: ") and option.value != row.defaults.get(self.entry, row.default):
                raise self.refused(name, row.rule.removeprefix("refused: "))

    def one_of(self, name: str, values: Mapping[str, str]) -> str:
        """Our value for the value of an option. Raises ConfigError for an unknown value."""
        value = self[name]
        key = str(value).lower() if isinstance(value, bool) else str(value)
        if key not in values:
            raise self.refused(name, f"rlhf has no equivalent; allowed: {', '.join(values)}")
        return values[key]

    def positive(self, name: str) -> int:
        """The value of an option that is a count. Raises ConfigError if it is below 1."""
        value: int = self[name]
        if value < 1:
            raise self.refused(name, "it must be at least 1")
        return value

    def refused(self, name: str, reason: str) -> ConfigError:
        """The error for a value that cannot be converted."""
        option = self.user_values.get(name)
        label = f"{option.location}: {option.text}" if option else f"{name} {self[name]} ({self.framework}'s default)"
        return ConfigError(f"{label}: {reason}. (--set {name}=VALUE replaces the value)")
