"""The run file as a whole: its sections, its short forms, and where each value was written.

``config.py`` loads TOML and flags into :class:`RunFile`; nothing else reads them raw. The sections are in
:mod:`rlhf_runtime.config.sections` and :mod:`rlhf_runtime.config.data_section`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, PrivateAttr, model_validator
from rlhf.interfaces.component import ComponentConfig

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.sections import (
    CheckpointSection,
    Choice,
    EnvSection,
    EvalSection,
    ModelSection,
    PlacementSection,
    RewardSection,
    RunSection,
    SamplingSection,
    StreamSection,
    SyncSection,
    unique,
)

SINGLE: dict[str, type[Choice]] = {
    "algorithm": Choice,
    "rollout": Choice,
    "env": EnvSection,
    "trainer": Choice,
    "generator": Choice,
    "launcher": Choice,
}
"""Sections that hold one plugin."""
LISTS: dict[str, type[Choice]] = {"reward": RewardSection, "observer": Choice}
"""Sections that hold several."""


def _with_options(cls: type[Choice], value: Any) -> Any:
    """``{use, a, b}`` -> ``{use, options: {a, b}}``, keeping the section's own fields."""
    if not isinstance(value, dict) or "options" in value:
        return value
    own = {k: v for k, v in value.items() if k in cls.model_fields}
    return {**own, "options": {k: v for k, v in value.items() if k not in cls.model_fields}}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def expand(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms as tables and lists of tables, with plugins' options still beside ``use``."""
    data = dict(data)
    for key in SINGLE:
        if isinstance(data.get(key), str):
            data[key] = {"use": data[key]}
    for key in LISTS:
        if key in data:
            data[key] = [{"use": v} if isinstance(v, str) else v for v in _listed(data[key])]
    if isinstance(data.get("data"), dict):
        short = {k: list(map(_source, _listed(data["data"][k]))) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **short}
    return data


def long_form(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms spelled out (``algorithm = "NAME"``, ``reward = ["NAME", ...]``, ``data.train = "FILE"``) and
    plugins' options put apart, as the sections hold them."""
    data = expand(data)
    for key, cls in SINGLE.items():
        if key in data:
            data[key] = _with_options(cls, data[key])
            usual = RunFile.model_fields[key].default
            if isinstance(usual, Choice) and isinstance(data[key], dict):  # `[trainer] lr = 1e-5` is of the usual one
                data[key] = {"use": usual.use, **data[key]}
    for key, cls in LISTS.items():
        if key in data:
            data[key] = tuple(_with_options(cls, v) for v in data[key])
    if isinstance(data.get("data"), dict):
        sources = {k: tuple(data["data"][k]) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **sources}
    return data


class Origins(dict[str, str]):
    """{dotted path: file and line, or flag} of what the user wrote; takes no part in comparing run files."""

    options: tuple[str, ...] = ()
    """Dotted paths of the options that the user set, by file, flag or in Python."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins)

    __hash__ = None


class RunFile(ComponentConfig):
    run: RunSection = RunSection()
    algorithm: Choice
    data: DataSection = DataSection()
    sampling: SamplingSection = SamplingSection()
    stream: StreamSection = StreamSection()
    rollout: Choice = Choice(use="single_turn")
    env: EnvSection | None = None
    reward: tuple[RewardSection, ...] = ()
    policy: ModelSection = ModelSection()
    critic: ModelSection = ModelSection()
    reference: ModelSection = ModelSection()
    roles: dict[str, ModelSection] = Field(default_factory=dict)
    """Further roles by name (reward models)."""
    trainer: Choice = Choice(use="torch")
    generator: Choice = Choice(use="transformers")
    launcher: Choice = Choice(use="local")
    placement: dict[str, PlacementSection] = Field(default_factory=dict)
    """By role name, and ``generator``; what is not named has one rank on one device."""
    sync: SyncSection = SyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observer: tuple[Choice, ...] = ()

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        """Where each value was written, for error messages; empty where the run file was made in Python."""
        return self._origins

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        return long_form(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _names(self) -> RunFile:
        unique([r.label for r in self.reward], "reward: two are named", "give one of them another `name`")
        unique([o.label for o in self.observer], "observer: listed twice:", "list it once")
        self._origins.options = tuple(_paths_set(self))  # later copies have the options filled in that are at defaults
        return self


def _paths_set(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the fields that were given a value, as ``config.toml`` names them."""
    if isinstance(value, ComponentConfig):
        items = {name: getattr(value, name) for name in type(value).model_fields if name in value.model_fields_set}
        items |= items.pop("options", {}) if isinstance(value, Choice) else {}
    elif isinstance(value, Mapping):
        items = dict(value)
    elif isinstance(value, tuple) and any(isinstance(item, ComponentConfig) for item in value):
        items = {str(number): item for number, item in enumerate(value)}
    else:
        yield path
        return
    for name, item in items.items():
        yield from _paths_set(item, f"{path}.{name}" if path else str(name))
