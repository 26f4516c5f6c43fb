"""One row as the fields of its form, each value checked: texts, conversations, labels, margins, steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf.errors import DataError, brief, did_you_mean
from rlhf.types import Row

from rlhf_runtime.data.conversions import is_turns, turns
from rlhf_runtime.data.labelled_steps import NO_LABEL
from rlhf_runtime.data.messages import read_messages
from rlhf_runtime.data.sources import TOOLS, SourceLayout
from rlhf_runtime.data.strict_json import STRICT

Message = Mapping[str, Any]
"""``role``, ``content`` and further fields that a chat template reads."""

LABELS: Mapping[str, bool] = {"true": True, "1": True, "+": True, "false": False, "0": False, "-": False}
"""Texts that are labels, in upper or lower case. Files without types (csv) have text labels only."""


class Cells:
    """The values of a row by field, read with a layout.

    The constructor and every method raise DataError with the value, its column and the allowed values.
    """

    def __init__(self, row: Row, layout: SourceLayout) -> None:
        self.row, self.layout = row, layout
        try:
            self.values = layout.read(row.columns)
        except DataError as error:
            raise DataError(f"columns {', '.join(map(repr, layout.columns.values()))}: {error}") from None

    def __contains__(self, field: str) -> bool:
        return field in self.values

    def name(self, field: str) -> str:
        """The column of a field, as messages name it."""
        return f"column {self.layout.name(field)!r}"

    def value(self, field: str) -> Any:
        if field not in self.values:
            column, columns = self.layout.name(field), self.row.columns
            raise DataError(
                f"no column {column!r}; columns present: {', '.join(columns)}.{did_you_mean(column, columns)}"
            )
        return self.values[field]

    def text(self, field: str, allowed: str = "text") -> str:
        value = self.value(field)
        if not isinstance(value, str):
            template = isinstance(value, list) and field in ("prompt", "response", "chosen", "rejected")
            raise DataError(
                f"{self.name(field)}: must be {allowed}, got {type(value).__name__} {str(value)[:60]!r}"
                f"{'. Messages need a chat template, and none is used: see data.chat_template' if template else ''}"
            )
        return value

    def messages(self, field: str) -> list[Message]:
        """A conversation, of messages or of turns, as :func:`read_messages` reads it."""
        value, name = self.value(field), self.name(field)
        if is_turns(value):
            value = turns({"messages": value}, True)["messages"]
        if not isinstance(value, list) or not value:
            raise DataError(f"{name}: must be a list of {{role, content}} messages, got {str(value)[:60]!r}")
        for i, message in enumerate(value):
            content = message.get("content") if isinstance(message, Mapping) else ""
            if content in (None, []) and not (message.get("tool_calls") or message.get("function_call")):
                raise DataError(f"{name}, message {i}: content must be text, got {str(content)[:60]!r}")
        messages = read_messages(value, f"{name}, ")
        for i, message in enumerate(messages):
            for call in message.get("tool_calls", ()):
                if not isinstance(arguments := call["function"]["arguments"], Mapping):
                    raise DataError(
                        f"{name}, message {i}: the arguments of a tool call must be an object, or its JSON as text, "
                        f"got {brief(arguments)}"
                    )
        return [*messages]

    def images(self) -> list[Any]:
        """The images in the row's column of images, in any form that :mod:`rlhf_runtime.data.image_files` reads."""
        value = self.values.get("images")
        if value is None or (isinstance(value, str) and not value):
            return []
        return list(value) if isinstance(value, list | tuple) else [value]

    def tools(self) -> list[Mapping[str, Any]]:
        """Descriptions of functions, unchanged. In the row they may be JSON text. Empty if the row has none."""
        value, name = self.values.get(TOOLS), self.name(TOOLS)
        try:
            value = STRICT.decode(value) if isinstance(value, str) and value else value
            if isinstance(value, list):
                value = [STRICT.decode(t) if isinstance(t, str) and t.startswith("{") else t for t in value]
        except (ValueError, RecursionError) as error:
            raise DataError(f"{name}: must be a list of tools, or its JSON as text: {error}") from None
        if value in (None, ""):
            return []
        if not isinstance(value, list):
            raise DataError(f"{name}: must be a list of tools, or its JSON as text, got {brief(value)}")
        for number, tool in enumerate(value):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise DataError(
                    f"{name}, tool {number}: must be {{type, function: {{name, description, parameters}}}} or {{name, "
                    f"description, parameters}}, got {brief(tool)}"
                )
        return value

    def label(self) -> bool:
        """A boolean, 0 or 1, or one of the texts of :data:`LABELS`."""
        label = as_label(value := self.value("label"))
        if label is None:
            raise DataError(
                f"{self.name('label')}: a label must be true or false, 1 or 0, '+' or '-', got {brief(value)}"
            )
        return label

    def margin(self) -> float:
        """How much better the chosen answer is: a finite number, which may be text."""
        value = self.value("margin")
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):  # the last of an integer with hundreds of digits
            number = math.nan
        if not math.isfinite(number):
            raise DataError(f"{self.name('margin')}: a margin must be a finite number, got {brief(value)}")
        return number

    def steps(self) -> list[str]:
        """The texts of a solution's steps."""
        value, name = self.value("steps"), self.name("steps")
        if not isinstance(value, list) or not value:
            raise DataError(f"{name}: must be a list of step texts, got {brief(value)}")
        for number, text in enumerate(value, 1):
            if not isinstance(text, str):
                raise DataError(f"{name}, step {number}: must be text, got {brief(text)}")
        return value

    def step_labels(self) -> list[float | None]:
        """A label for each step: a hard label (as in :meth:`label`), the probability (0 .. 1) that the step is right,
        or None if the data set marks the step as not labelled."""
        value, name = self.value("step_labels"), self.name("step_labels")
        if not isinstance(value, list):
            raise DataError(f"{name}: must be a list with a label for each step, got {brief(value)}")
        labels = list[float | None]()
        for number, item in enumerate(value, 1):
            if item is NO_LABEL:
                labels.append(None)
                continue
            hard = as_label(item)
            if hard is None and (not isinstance(item, int | float) or not 0 <= item <= 1):
                raise DataError(
                    f"{name}, step {number}: a label must be true or false, '+' or '-', or a number from 0 to 1, "
                    f"got {brief(item)}"
                )
            labels.append(float(item if hard is None else hard))
        if value and labels == [None] * len(value):
            raise DataError(f"{name}: no step has a label, so nothing can be learnt from the row")
        return labels


def as_label(value: Any) -> bool | None:
    """A value as a label; None if it is not a label."""
    if isinstance(value, str):
        return LABELS.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None
