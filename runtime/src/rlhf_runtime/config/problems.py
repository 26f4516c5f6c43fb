"""Messages about a configuration, one line per problem: path, origin, value got, what is allowed, nearest match."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from rlhf.errors import ConfigError, RlhfError, did_you_mean

from rlhf_runtime.config.flag_values import NO_VALUE, item_of, model_of, toml_value
from rlhf_runtime.config.suggestions import Suggestions

_TOML_NAMES: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "float",
    str: "string",
    list: "list",
    tuple: "list",
    dict: "table",
    type(None): "nothing",
}


def raise_problems(headline: str, problems: Sequence[str], error: type[RlhfError] = ConfigError) -> None:
    """Raises one error that lists every problem. Returns if there is none."""
    if not problems:
        return
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise error("\n".join([f"{headline} ({count}):", *("  " + p.replace("\n", "\n  ") for p in problems)]))


def describe(
    error: ValidationError,
    model: type[BaseModel],
    prefix: str,
    origins: Mapping[str, str],
    suggestions: Suggestions | None = None,
) -> list[str]:
    """One line for each error of validating ``model``, whose fields the user writes below ``prefix``.

    Args:
        suggestions: finds similar names for unknown keys; default: only names of the section itself.
    """
    by_location: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # pydantic does not count refused items, each of which has its own line
        location = tuple(str(part) for part in details["loc"] if "[" not in str(part))  # without the branch of a union
        by_location.setdefault(location, []).append({**details, "loc": location})
    lines = []
    for errors in by_location.values():
        right_type = [e for e in errors if not e["type"].endswith("_type")]  # of a union's branches that fit the type
        for entry in errors[:1] if errors[0]["input"] is NO_VALUE else right_type or errors:
            *parents, name = entry["loc"] or ("",)
            section, path = _model_at(model, parents), ".".join([prefix, *entry["loc"]] if prefix else entry["loc"])
            if entry["type"] == "extra_forbidden":
                fields = section.model_fields if section is not None else ()
                lines += unknown_keys(path, entry["input"], fields, origins, suggestions)
            else:
                field = section.model_fields.get(name) if section is not None else None
                lines.append(_line(entry, path, field, origins))
    return lines


def unknown_keys(
    path: str,
    value: Any,
    allowed: Iterable[str],
    origins: Mapping[str, str],
    suggestions: Suggestions | None = None,
) -> list[str]:
    """The lines for an unknown key. A table has one line for each key in it."""
    names = sorted(set(allowed) - {"options"})  # which users do not write: it holds the others
    listing = f"Allowed here: {', '.join(names)}." if names else "There are no options here."
    section = get_close_matches(path, names, n=1, cutoff=0.8) if isinstance(value, Mapping) else []
    lines = []
    for key in [f"{path}.{leaf}" for leaf in leaves(value)] if isinstance(value, Mapping) and value else [path]:
        location = origin(key, origins)
        if section and "." not in path:
            hint = f" Did you mean the section {section[0]!r}?"
        elif suggestions is None:
            hint = did_you_mean(path.rpartition(".")[2], names)
        else:
            hint = suggestions.suggest(key, names if key == path else (), "flag --" in location)
        suffix = "" if hint and "'" not in hint else f" {listing}"  # suggestions from other sections are not quoted
        if "." not in key and "flag --" in location:
            dots = "" if hint else " Fields of the run file are dotted: --run.seed 3"
            lines.append(f"no flag --{key}.{hint}{dots}")
        else:
            lines.append(f"{key}{location}: unknown key.{hint}{suffix}")
    return lines


def leaves(table: Mapping[str, Any]) -> list[str]:
    """Dotted paths of the values in nested tables."""
    paths: list[str] = []
    for key, value in table.items():
        paths += [f"{key}.{p}" for p in leaves(value)] if isinstance(value, Mapping) and value else [key]
    return paths


def origin(path: str, origins: Mapping[str, str]) -> str:
    """`` (run.toml, line 3)``: the place of the path, or of the nearest section above it; empty if neither was
    written."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        source = origins.get(".".join(parts[:n]))
        if source:
            return f" ({source})"
    return ""


def type_and_value(value: Any) -> str:
    """``string 'abc'``, shortened."""
    text = repr(value)
    return f"{_TOML_NAMES.get(type(value), type(value).__name__)} {text if len(text) <= 80 else text[:77] + '...'}"


def _line(error: dict[str, Any], path: str, field: FieldInfo | None, origins: Mapping[str, str]) -> str:
    kind, value = error["type"], error["input"]
    label = f"{path}{origin(path, origins)}"
    if kind == "missing":
        item = item_of(field.annotation) if field is not None else None
        tables = item is not None and item[0] is dict and model_of(item[1]) is not None
        is_list = item is not None and item[0] is not dict
        advice = f" Write a table [{path}.NAME] for each." if tables else _how_to_give(path, is_list)
        return f"{label}: required, but not set.{advice}"
    message = str(error["msg"])
    if kind in ("value_error", "assertion_error"):
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        return f"{label}: {message}" if path else message  # a check of several sections already names them
    message = re.sub(r" or instance of \w+", "", message)
    message = re.sub(r"^\w+ (should have at least \d+ \w+)( after validation.*)?$", r"\1", message)
    message = message.removeprefix("Input ").replace("valid dictionary", "table").replace("valid tuple", "list")
    if value is NO_VALUE:
        default = field.default if field is not None and isinstance(field.default, int | float | str) else None
        return f"{label}: needs a value, which {message}{f', e.g. --{path} {default}' if default else ''}."
    hint = ""
    if kind in ("tuple_type", "list_type") and isinstance(value, str) and "flag --" in label:
        hint = f" Write a list in the form of TOML: '{_as_list(value)}'."
    if kind == "bool_type":
        hint = " Write true or false, without quotes."
    if kind == "literal_error" and isinstance(value, str):
        hint = did_you_mean(value, [e.strip("' ") for e in error["ctx"]["expected"].replace(" or ", ",").split(",")])
    return f"{label}: {message}, got {type_and_value(value)}.{hint}"


def _as_list(text: str) -> str:
    """The list that a flag's text probably means: ``0.9,0.95`` gives ``[0.9, 0.95]``, and ``[a]`` gives ``["a"]``."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    items = [toml_value(item.strip()) for item in inner.split(",")]
    parts = [item.strip().strip("\"'") for item in inner.split(",")]
    values = [item if isinstance(item, int | float) else part for item, part in zip(items, parts, strict=True)]
    return json.dumps(values, ensure_ascii=False)


def _how_to_give(path: str, is_list: bool) -> str:
    if path == "algorithm":
        return ' Name one with --algo NAME or `algorithm = "NAME"`; `rlhf plugins list` shows them.'
    if path.rsplit(".", 1)[-1] == "use":
        return f' Name the plugin: `use = "NAME"` or --{path} NAME.'
    value = "'[VALUE, ...]'" if is_list else "VALUE"
    return f" Set it with --{path} {value}."


def _model_at(model: type[BaseModel], location: Sequence[str]) -> type[BaseModel] | None:
    annotation: Any = model
    for part in location:
        parent, item = model_of(annotation), item_of(annotation)
        if parent is not None and part in parent.model_fields:
            annotation = parent.model_fields[part].annotation
        elif item is not None:
            annotation = item[1]
        else:
            return None
    return model_of(annotation)
