"""Reward classes that call plain functions (:mod:`rlhf.plugins.functions` has their forms)."""

from __future__ import annotations

import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rlhf.errors import ConfigError, RewardError, brief
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.plugins.functions import Form, is_async
from rlhf.types import Group, RewardResult, Row, Trajectory

NOT_PASSED = ("trainer_state", "environments")
"""Parameters of such functions in other frameworks that have no value here."""


def reward_of_function(
    function: Callable[..., Any], form: Form, *, name: str, class_name: str, module: str, label: str
) -> type[Any]:
    """A Reward class that calls ``function``. Its ``score`` is ``async`` if the function is.

    Args:
        name: of the reward.
        class_name, module: ``__qualname__`` and ``__module__`` of the class.
        label: name of the function in messages.
    """
    if form == "sample":
        base, body = _reward_of_samples(function, label)
    else:
        base = RewardOfSamples if form == "samples" else RewardOfSolution
        reads = "tokens" if "completion_ids" in inspect.signature(function).parameters else "text"
        score = base.score_async if is_async(function) else base.score
        body = {"function": staticmethod(function), "label": label, "reads": reads, "score": score}
    body |= {
        "name": name,
        "__module__": module,
        "__doc__": function.__doc__ or f"Scores samples with {label}.",
        "made_from": staticmethod(function),
    }
    return type(class_name, (base,), body)


def _reward_of_samples(function: Callable[..., Any], label: str) -> tuple[type[Any], dict[str, Any]]:
    """The base and the body of a Reward class that calls ``function(prompt, completion, row)`` for each sample."""

    def arguments(t: Trajectory) -> tuple[str, str, Mapping[str, Any]]:
        return t.prompt_text, t.completion, t.row.columns

    def score(self: Any, group: Group) -> list[RewardResult]:
        return [RewardResult(reward_value(function(*arguments(t)), label)) for t in group.trajectories]

    async def score_async(self: Any, group: Group) -> list[RewardResult]:
        return [RewardResult(reward_value(await function(*arguments(t)), label)) for t in group.trajectories]

    return Reward, {"per_sample": True, "reads": "text", "score": score_async if is_async(function) else score}


def reward_value(value: Any, label: str, location: str = "") -> float | None:
    """A reward function's return value for a sample, checked: a finite number or None.

    Args:
        label: name of the function in messages.
        location: which of several samples the value is for, in messages.

    Raises RewardError otherwise.
    """
    if value is None:
        return None
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # an integer that is too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"{label} returned {brief(value)}{location}; expected a finite number or None")
    return number


class FunctionConfig(ComponentConfig):
    """What a reward function gets beside the samples."""

    columns: dict[str, str] = {}
    """{parameter: column of the data}, where their names differ: ``columns.solution = "answer"``. A dotted name is a
    value inside of a column."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments: ``arguments.tolerance = 0.1``."""


class SamplesConfig(FunctionConfig):
    messages: bool | None = None
    """Whether each completion is a list with one message, and each prompt a list of messages. Absent: where the prompt
    of the data is one. A function that needs messages works with text as prompt if this is true."""


class ColumnFunction(Reward):
    """Calls ``function`` with keyword arguments. Made by :func:`reward_of_function`."""

    Config: ClassVar[type[FunctionConfig]] = FunctionConfig
    function: Callable[..., Any]
    label: str
    samples: ClassVar[tuple[str, ...]]
    """Parameters that are not columns of the data."""
    default_columns: ClassVar[Mapping[str, str]] = {}
    """{parameter: column}, unless an option names another column."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        parameters = inspect.signature(self.function).parameters
        self._takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        self._names = [n for n, p in parameters.items() if p.kind != p.VAR_KEYWORD]
        self._needed = [n for n in self._names if parameters[n].default is inspect.Parameter.empty]
        columns, arguments = self.config.columns, self.config.arguments
        for option, names in (("columns", columns), ("arguments", arguments)):
            unknown = [n for n in names if n not in self._names and not self._takes_all]
            if name := next((n for n in names if n in self.samples), None):
                raise ConfigError(f"{option}.{name}: {self.label} gets {name!r} from the run. Remove the option.")
            if unknown:
                raise ConfigError(
                    f"{option}.{unknown[0]}: {self.label} has no parameter {unknown[0]!r}; it has "
                    f"{', '.join(self._names)}"
                )
        if duplicates := [n for n in columns if n in arguments]:
            raise ConfigError(f"columns.{duplicates[0]} and arguments.{duplicates[0]} are both set. Remove one.")
        if missing := [n for n in self._needed if n in NOT_PASSED and n not in columns and n not in arguments]:
            raise ConfigError(
                f"{self.label} has the parameter {missing[0]!r}, which rlhf does not pass to rewards. Give it a "
                "default such as None, and do not rely on it."
            )

    def columns(self) -> Mapping[str, str]:
        """{column: option that names another column}."""
        needed = [n for n in self._needed if n not in self.samples and n not in self.config.arguments]
        names = dict.fromkeys([*needed, *self.config.columns])
        return {self._column(name): f"columns.{name}" for name in names}

    def _column(self, parameter: str) -> str:
        return self.config.columns.get(parameter) or self.default_columns.get(parameter, parameter)

    def _values(self, row: Row) -> dict[str, Any]:
        """{parameter: value} for the columns of a row and the configured arguments."""
        if clash := [name for name in self.samples if name in row.columns]:
            raise RewardError(
                f"{self.label}: the data has a column {clash[0]!r}, but the argument of this name holds the samples. "
                "Rename the column."
            )
        names = [*self.config.columns, *self.default_columns]
        renamed = {name: row[self._column(name)] for name in names if self._column(name) in row.columns}
        return {**row.columns, **renamed, **self.config.arguments}

    def _checked(self, values: Mapping[str, Any], row: Row) -> dict[str, Any]:
        """The keyword arguments of a call: the values for which the function has parameters."""
        if missing := [n for n in self._needed if n not in values]:
            raise RewardError(
                f"{self.label} has the parameter {missing[0]!r}, and the data has no such column; it has "
                f"{', '.join(row.columns)}. Set `columns.{missing[0]}` or `arguments.{missing[0]}`."
            )
        return dict(values) if self._takes_all else {n: values[n] for n in self._names if n in values}


class RewardOfSamples(ColumnFunction):
    """Reward of ``f(completions, **columns)``."""

    Config = SamplesConfig
    samples = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")

    def score(self, group: Group) -> list[RewardResult]:
        log = _Log(group, self.label)
        return self._results(self.function(**self._arguments(group, log)), group, log)

    async def score_async(self, group: Group) -> list[RewardResult]:
        log = _Log(group, self.label)
        return self._results(await self.function(**self._arguments(group, log)), group, log)

    def _arguments(self, group: Group, log: _Log) -> dict[str, Any]:
        """Lists with an item for each sample of a group."""
        row, samples = group.row, group.trajectories
        options = self.config.arguments
        columns = {n: v if n in options else [v] * len(samples) for n, v in self._values(row).items()}
        fields = row.layout.read(row.columns) if row.layout is not None else row.columns
        prompt, texts = fields.get("prompt"), [t.completion for t in samples]
        as_messages = isinstance(prompt, list) if self.config.messages is None else self.config.messages
        prompts: list[Any] = [t.prompt_text if isinstance(prompt, list) or prompt is None else prompt for t in samples]
        if as_messages:
            prompts = [prompt if isinstance(prompt, list) else [{"role": "user", "content": p}] for p in prompts]
        values = {
            **columns,
            "prompts": prompts,
            "completions": [[{"role": "assistant", "content": t}] for t in texts] if as_messages else texts,
            "log_extra": log.extra,
            "log_metric": log.metric,
        }
        ids = [_completion_ids(t) for t in samples]
        if any(ids) or not any(texts):  # answers from elsewhere have no tokens where no tokenizer is known
            values["completion_ids"] = ids
        return self._checked(values, row)

    def _results(self, values: Any, group: Group, log: _Log) -> list[RewardResult]:
        """Converts what a function returned, a list or array with a number or None for each sample, to results."""
        numbers = _as_list(values, len(group.trajectories))
        if numbers is None:
            raise RewardError(
                f"{self.label} returned {brief(values)}; expected a list with {len(group.trajectories)} numbers"
            )
        rewards = [
            reward_value(_plain(v), self.label, f" for sample {t.index}")
            for v, t in zip(numbers, group.trajectories, strict=True)
        ]
        return [RewardResult(value, info=info) for value, info in zip(rewards, log.infos(), strict=True)]


class RewardOfSolution(ColumnFunction):
    """Reward of ``f(solution_str, ground_truth, **columns)``."""

    per_sample = True
    samples = ("solution_str",)
    default_columns: ClassVar = {"ground_truth": "reward_model.ground_truth"}

    def score(self, group: Group) -> list[RewardResult]:
        return [self._result(self.function(**self._arguments(t))) for t in group.trajectories]

    async def score_async(self, group: Group) -> list[RewardResult]:
        return [self._result(await self.function(**self._arguments(t))) for t in group.trajectories]

    def columns(self) -> Mapping[str, str]:
        """Without ``extra_info``: if it is missing, a function gets an empty mapping."""
        return {c: option for c, option in super().columns().items() if c != "extra_info"}

    def _arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """Other columns are not passed through ``**``, because such functions pass it on."""
        names = {*self._names, *self.config.columns, *self.config.arguments, "data_source", "ground_truth"}
        values = {n: v for n, v in self._values(trajectory.row).items() if n in names}
        values = {"extra_info": {}, **values, "solution_str": trajectory.completion}
        return self._checked(values, trajectory.row)

    def _result(self, value: Any) -> RewardResult:
        """Converts a number, None, or a mapping with the number as ``score`` to a result."""
        if not isinstance(value, Mapping):
            return RewardResult(reward_value(_plain(value), self.label))
        if "score" not in value:
            raise RewardError(f"{self.label} returned a mapping with {', '.join(map(str, value))}; 'score' is missing")
        info = {str(name): _plain(item) for name, item in value.items() if name != "score"}
        return RewardResult(reward_value(_plain(value["score"]), self.label), info=info)


class _Log:
    """The values that a function logs in one call, for the samples of a group."""

    def __init__(self, group: Group, label: str) -> None:
        self._samples, self._label = len(group.trajectories), label
        self._extra: dict[str, Sequence[Any]] = {}
        self._metrics: dict[str, list[float]] = {}

    def extra(self, column: str, values: Any) -> None:
        """A value for each sample."""
        items = _as_list(values, self._samples)
        if items is None:
            raise RewardError(
                f"{self._label}: log_extra({column!r}, {brief(values)}): expected a list with {self._samples} values, "
                "one for each sample"
            )
        self._extra[str(column)] = [_plain(item) for item in items]

    def metric(self, name: str, value: Any) -> None:
        """A number for all samples together. Numbers with the same name are averaged."""
        number = reward_value(_plain(value), f"{self._label}: log_metric({name!r})")
        if number is None:
            raise RewardError(f"{self._label}: log_metric({name!r}, None): expected a number")
        self._metrics.setdefault(str(name), []).append(number)

    def infos(self) -> list[dict[str, Any]]:
        if duplicates := sorted(self._extra.keys() & self._metrics.keys()):
            raise RewardError(f"{self._label} logs {duplicates[0]!r} with log_extra and with log_metric. Rename one.")
        metrics = {name: math.fsum(values) / len(values) for name, values in self._metrics.items()}
        return [{**{n: v[i] for n, v in self._extra.items()}, **metrics} for i in range(self._samples)]


def _as_list(values: Any, count: int) -> Sequence[Any] | None:
    """A list or an array as a list; None if it does not have ``count`` items."""
    items = values.tolist() if hasattr(values, "tolist") else values
    return items if isinstance(items, list | tuple) and len(items) == count else None


def _plain(value: Any) -> Any:
    """The number in an array or tensor without dimensions; other values unchanged."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """The tokens after the prompt, observations included."""
    turns = itertools.dropwhile(lambda turn: not turn.sampled, trajectory.turns)
    return [token for turn in turns for token in turn.ids]
