"""A plugin with its options: the check of the options, and the messages about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from rlhf.errors import ConfigError, PluginError, boundary
from rlhf.interfaces import ComponentConfig
from rlhf.plugins import Resolved

from rlhf_runtime.config.flag_values import FlagText, plain, read
from rlhf_runtime.config.problems import describe, origin, type_and_value, unknown_keys
from rlhf_runtime.config.suggestions import Suggestions


@dataclass(frozen=True, slots=True)
class Selection:
    """A resolved plugin with its checked config; picklable, so that workers can build it again."""

    resolved: Resolved
    config: ComponentConfig

    def build(self, *args: Any, **kwargs: Any) -> Any:
        """``cls(config, *args, **kwargs)``. Errors of the constructor are attributed to the plugin."""
        with boundary(PluginError, f"building {self.resolved}"):
            return self.resolved.cls(self.config, *args, **kwargs)


def options_config(
    resolved: Resolved,
    options: Mapping[str, Any],
    where: str,
    origins: Mapping[str, str],
    extra: Mapping[str, Any] | None = None,
    elsewhere: Mapping[str, str] | None = None,
    suggestions: Suggestions | None = None,
) -> tuple[ComponentConfig | None, list[str]]:
    """The config, or None and the problems. ``extra``: further keys that the section may have; ``elsewhere``: {field:
    slot} of fields that belong into a slot's section."""
    problems = []
    model = resolved.cls.Config
    merged = dict(resolved.options)
    for key, value in options.items():
        if key in merged and plain(value) != merged[key]:
            problems.append(
                f"{where}.{key}{origin(f'{where}.{key}', origins)}: {type_and_value(plain(value))}, but the reference "
                f"{resolved.ref!r} already sets it to {merged[key]!r}. Keep one of them."
            )
        merged[key] = value
    for key in [k for k in merged if k not in model.model_fields]:
        path = f"{where}.{key}"
        value = merged.pop(key)
        if elsewhere and key in elsewhere:
            problems.append(
                f"{path}{origin(path, origins)}: belongs to {where}.{elsewhere[key]}; write "
                f"--{where}.{elsewhere[key]}.{key} {value if isinstance(value, FlagText) else plain(value)}."
            )
        else:
            allowed = [*model.model_fields, *(extra or ())]
            problems += unknown_keys(path, value, allowed, origins, suggestions)
    try:
        config = model.model_validate(read(model, merged))
    except ValidationError as error:
        return None, problems + describe(error, model, where, origins, suggestions)
    return (None if problems else config), problems


def refuse(refusals: list[tuple[Resolved, list[str]]]) -> None:
    raise ConfigError("\n".join(refusal_lines(refusals)))


def refusal_lines(refusals: list[tuple[Resolved, list[str]]]) -> list[str]:
    lines = []
    for resolved, problems in refusals:
        lines += [f"{resolved} cannot be configured like this:", *(f"  {p}" for p in problems)]
    return lines


def dumped(config: ComponentConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude_none=True)
