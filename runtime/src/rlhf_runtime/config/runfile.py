"""The whole run file: its sections, its short forms, and the origin of each value.

:mod:`rlhf_runtime.config.load` makes a :class:`RunFile` from TOML and flags. The sections are in
:mod:`rlhf_runtime.config.sections` and :mod:`rlhf_runtime.config.data_section`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, PrivateAttr, model_validator
from rlhf.interfaces.component import ComponentConfig

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.config.sections import (
    ROLES,
    CheckpointSection,
    Choice,
    EnvSection,
    EvalSection,
    ModelSection,
    ObserverSection,
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
    "curriculum": Choice,
    "rollout": Choice,
    "env": EnvSection,
    "trainer": Choice,
    "generator": Choice,
    "launcher": Choice,
}
"""Sections that hold one plugin."""
LISTS: dict[str, type[Choice]] = {"reward": RewardSection, "observer": ObserverSection}
"""Sections that hold several."""
LIST_PATHS: Mapping[str, str] = {**dict.fromkeys(LISTS, "use"), "data.train": "path", "data.eval": "path"}
"""{path of a list of sections: the field that a plain text sets}."""


def _with_options(cls: type[Choice], value: Any) -> Any:
    """``{use, a, b}`` -> ``{use, options: {a, b}}``, keeping the section's own fields."""
    if not isinstance(value, dict) or "options" in value:
        return value
    fields = {k: v for k, v in value.items() if k in cls.model_fields}
    return {**fields, "options": {k: v for k, v in value.items() if k not in cls.model_fields}}


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def expand(data: dict[str, Any]) -> dict[str, Any]:
    """Expand short forms to tables and lists of tables. Plugins' options stay beside ``use``."""
    data = dict(data)
    for key in SINGLE:
        if isinstance(data.get(key), str):
            data[key] = {"use": data[key]}
    for key in LISTS:
        if key in data:
            data[key] = [{"use": v} if isinstance(v, str) else v for v in _as_list(data[key])]
    if isinstance(data.get("data"), dict):
        short = {k: list(map(_source, _as_list(data["data"][k]))) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **short}
    return data


def long_form(data: dict[str, Any]) -> dict[str, Any]:
    """The tables with short forms expanded (``algorithm = "NAME"``, ``reward = ["NAME", ...]``,
    ``data.train = "FILE"``) and plugins' options separated, in the form of the sections."""
    data = expand(data)
    for key, cls in SINGLE.items():
        if key in data:
            data[key] = _with_options(cls, data[key])
            default = RunFile.model_fields[key].default
            if isinstance(default, Choice) and isinstance(data[key], dict):  # `[trainer] lr = 1e-5`: the default
                data[key] = {"use": default.use, **data[key]}
    for key, cls in LISTS.items():
        if key in data:
            data[key] = tuple(_with_options(cls, v) for v in data[key])
    if isinstance(data.get("data"), dict):
        sources = {k: tuple(data["data"][k]) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **sources}
    return data


class Origins(dict[str, str]):
    """{dotted path: file and line, or flag} of the user's values. It is ignored when run files are compared."""

    options: tuple[str, ...] = ()
    """Dotted paths of the options that the user set, by file, flag or in Python."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins)

    __hash__ = None


class RunFile(ComponentConfig):
    run: RunSection = RunSection()
    """Where the run is written, how long it is, and its seed."""
    algorithm: Choice
    """What is learnt, and how."""
    data: DataSection = DataSection()
    """Where rows come from, which columns they have, and how they become tokens."""
    curriculum: Choice | None = None
    """Which rows come next; where absent they come in the order of ``[data]``."""
    sampling: SamplingSection = SamplingSection()
    """How answers are sampled in training."""
    stream: StreamSection = StreamSection()
    """With which weights batches are sampled, and what happens to samples that fail."""
    rollout: Choice = Choice(use="single_turn")
    """How one sample is made: in one turn, in several turns, or from a record."""
    env: EnvSection | None = None
    """The environment that answers the policy's turns."""
    reward: tuple[RewardSection, ...] = ()
    """What scores an answer. Several rewards are added, each times its weight."""
    policy: ModelSection = ModelSection()
    """The model that answers, and that is trained."""
    critic: ModelSection = ModelSection()
    """The model that predicts returns, where the algorithm has one."""
    reference: ModelSection = ModelSection()
    """The frozen model that the policy is compared with, where the algorithm has one."""
    roles: dict[str, ModelSection] = Field(default_factory=dict)
    """Further roles by name (reward models)."""
    trainer: Choice = Choice(use="torch")
    """What computes gradients and takes optimizer steps."""
    generator: Choice = Choice(use="transformers")
    """What samples the tokens of answers."""
    launcher: Choice = Choice(use="local")
    """Where the processes of the run are started."""
    placement: dict[str, PlacementSection] = Field(default_factory=dict)
    """By role name, and ``generator``. A role that is not named has one rank on one device."""
    sync: SyncSection = SyncSection()
    eval: EvalSection = EvalSection()
    """When and how held-out rows are evaluated, and which checkpoint is the best."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When the run is saved and exported, and how much is kept."""
    observer: tuple[ObserverSection, ...] = ()
    """Plugins that receive the run's events, such as a logger of metrics."""

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        """The origin of each value, for error messages; empty if the run file was created in Python."""
        return self._origins

    @property
    def models(self) -> dict[str, ModelSection]:
        """{path: section} of all sections about models: ``critic``, ``roles.NAME``."""
        return {name: getattr(self, name) for name in ROLES} | {f"roles.{n}": s for n, s in self.roles.items()}

    @property
    def most_checkpoints(self) -> int:
        """The largest number of checkpoints that the run has at a time."""
        has_best = self.checkpoint.save_best and bool(self.data.eval)
        # One more than are kept, because the next is complete before the oldest is deleted.
        return self.checkpoint.keep + 1 + has_best if self.checkpoint.every or has_best else 1

    def value(self, path: str) -> Any:
        """The value at a dotted path. An absent option or section is None, like an option that was set to None in
        Python."""
        node: Any = self
        for part in path.split("."):
            if isinstance(node, tuple):
                node = node[int(part)]
            elif isinstance(node, Choice):
                node = getattr(node, part) if part in type(node).model_fields else node.options.get(part)
            else:
                node = node.get(part) if isinstance(node, Mapping) else getattr(node, part, None)
        return node

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        return long_form(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _names(self) -> RunFile:
        unique([r.label for r in self.reward], "reward: two are named", "give one of them another `name`")
        unique([o.label for o in self.observer], "observer: listed twice:", "list it once")
        self._origins.options = tuple(_paths_set(self))  # before copies fill in the defaults of options
        return self


def _paths_set(value: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the fields that were set, as in ``config.toml``."""
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
