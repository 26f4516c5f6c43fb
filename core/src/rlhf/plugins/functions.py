"""Plain functions as rewards. The names of a function's parameters say which of three forms it has:

``f(prompt, completion, row) -> float | None``
    called for each sample; ``row`` is a mapping of the data row's columns;
``f(completions, **columns) -> list[float | None]``
    called with the samples of one prompt: ``completions``, ``prompts`` and ``completion_ids``, and each column of the
    data row, are lists with an item for each sample. If the prompt of the data is a list of messages, each
    completion is a list with one message. ``log_extra(name, values)`` stores a value with each sample, and
    ``log_metric(name, value)`` a number with all of them;
``f(solution_str, ground_truth, **columns) -> float | {"score": float, ...}``
    called for each sample, also with ``data_source`` and ``extra_info``; ``ground_truth`` is the column
    ``reward_model.ground_truth``. Further values of a mapping are stored with the sample.

A function of the last two forms gets only the arguments for which it has parameters, or all if it has ``**``. All forms
may be ``async def``, and may return None for a sample to which the reward does not apply.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

SAMPLE_PARAMETERS = ("prompt", "completion", "row")
"""``def NAME(prompt: str, completion: str, row: Mapping) -> float | None``, plain or async."""
FORMS = (
    "`def f(prompt, completion, row)` or `def f(solution_str, ground_truth, **columns)`, which returns a number for a "
    "sample, or `def f(completions, **columns)`, which returns a list with a number for each completion"
)
Form = Literal["sample", "samples", "solution"]
_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def form_of(names: Sequence[str]) -> Form | None:
    """The form of a function whose parameters have these names (without ``*`` and ``**``); None if no form fits."""
    if tuple(names) == SAMPLE_PARAMETERS:
        return "sample"
    if ("completions" in names or "completion_ids" in names) and "completion" not in names:
        return "samples"
    return "solution" if "solution_str" in names and "ground_truth" in names else None


def form_of_function(function: Callable[..., Any]) -> Form | None:
    """The form of a function or another callable object; None if no form fits, or its parameters cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    form = form_of([p.name for p in parameters if p.kind in _KEYWORD_KINDS])
    other_kinds = {p.kind for p in parameters} - {*_KEYWORD_KINDS}
    return form if other_kinds <= (set() if form == "sample" else {inspect.Parameter.VAR_KEYWORD}) else None


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object, is ``async def``."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
