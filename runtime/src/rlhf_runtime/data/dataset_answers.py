"""Answers in data rows: in one or several columns, each with one answer or a list of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError, did_you_mean
from rlhf.types import Group, Trajectory

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.messages import read_messages
from rlhf_runtime.data.row_rules import check_prompt
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.template import Template

COLUMNS = ("response", "responses", "completion", "completions", "answers")
"""Columns that are recognised as answers. ``answer`` is not one of them: beside a prompt it is often the solution."""


def answer_columns(source: Source, names: Sequence[str]) -> tuple[str, ...]:
    """The columns with a source's answers: the named ones, or else the one of :data:`COLUMNS` that it has.

    Raises DataError: a named column does not exist, or the source has none or several of :data:`COLUMNS`.
    """
    title, present = f"{source.name!r} ({source.section.path})", f"columns present: {', '.join(source.columns)}."
    for column in names:
        if not source.has(column):
            raise DataError(f"{title} has no column {column!r}; {present}{did_you_mean(column, source.columns)}")
    defaults = [c for c in COLUMNS if c in source.columns]
    if not names and len(defaults) != 1:
        problem = (
            f"has answers in {' and '.join(defaults)}" if defaults else f"has none of the columns {', '.join(COLUMNS)}"
        )
        raise DataError(f"{title} {problem}; {present} Name the columns with the answers: --answers COLUMN.")
    return tuple(names or defaults)


class DatasetAnswers:
    """Groups of answers in data rows: one group per row, in the order of the sources.

    Raises DataError, with file and line, for unusable answers that ``data.bad_rows`` or ``data.too_long`` do not drop.
    """

    def __init__(
        self, sources: Sequence[Source], columns: Sequence[str], template: Template, section: DataSection
    ) -> None:
        self.template, self.section = template, section
        self.columns = {source.name: answer_columns(source, columns) for source in sources}
        self._rows = [(source, index) for source in sources for index in range(len(source))]

    def __len__(self) -> int:
        return len(self._rows)

    def group(self, number: int, left_out: Counter[str]) -> Group:
        """The answers of row ``number``, in order. Answers that are left out are counted by reason."""
        source, index = self._rows[number]
        location, row = source.location(index), source[index]
        group = Group(row, number, [])
        try:
            texts = [text for column in self.columns[source.name] for text in _texts(row.columns, column)]
        except DataError as error:
            self._refuse("bad_rows", f"{location}: {error}", error)
            left_out["rows whose answers cannot be read"] += 1
            return group
        for sample, text in enumerate(texts):
            try:
                turns = self.template.encode_answer(row, text)
                tokens = sum(len(turn.ids) for turn in turns)
                long = check_prompt(len(turns[0].ids), self.section)
            except DataError as error:
                self._refuse("bad_rows", f"{location}, answer {sample}: {error}", error)
                left_out["answers that cannot be used"] += 1
                continue
            if not long and tokens > self.section.max_tokens:
                long = f"prompt and answer have {tokens} tokens, over data.max_tokens = {self.section.max_tokens}"
            if long:
                self._refuse("too_long", f"{location}, answer {sample}: {long}")
                left_out["answers that are too long"] += 1
                continue
            turns[1].text = text
            group.trajectories.append(Trajectory(row, turns, (number, sample)))
        return group

    def _refuse(self, key: str, problem: str, cause: Exception | None = None) -> None:
        """Raise DataError, unless the option ``key`` says to drop such answers."""
        if getattr(self.section, key) == "error":
            raise DataError(f"{problem}. Set --data.{key} drop to drop and count such answers.") from cause


def _texts(columns: Mapping[str, Any], name: str) -> list[str]:
    """The answers in a column. Raises DataError if the column holds none."""
    value = columns.get(name)
    items = value if isinstance(value, list) and not _is_message_list(value) else [value]
    texts = [_text(item, name) for item in items]
    if not texts:
        raise DataError(f"column {name!r} holds no answer")
    return texts


def _is_message_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and "role" in m for m in value)


def _text(value: Any, name: str) -> str:
    """An answer: text, or one message of the assistant."""
    if isinstance(value, str):
        return value
    if _is_message_list(value) and len(value) == 1 and value[0].get("content") is not None:
        [message] = read_messages(value, f"column {name!r}, ")
        text = message["content"]
        if message["role"] == "assistant" and isinstance(text, str) and "tool_calls" not in message:
            return text
    raise DataError(
        f"column {name!r}: must be an answer or a list of answers. An answer is text, or a list of one assistant "
        f"message with text and without tool calls; got {type(value).__name__} {str(value)[:60]!r}"
    )
