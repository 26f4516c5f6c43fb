"""Requirements on training rows: lengths, at least one trained token, labels of both kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlhf.errors import DataError, brief
from rlhf.types.examples import Example

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.row_fields import as_label
from rlhf_runtime.data.sources import Source


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """Whether a row can be used."""

    kind: Literal["", "too_long", "bad_rows"] = ""
    """Empty if the row can be used; else the option of ``[data]`` that decides whether it is refused or left out."""
    text: str = ""
    """The reason, if the row cannot be used."""
    example: Example | None = None
    """Its tokens (offline forms)."""
    error: DataError | None = None
    tokens: int = 0
    """Number of tokens of its longest sequence."""


def check_prompt(tokens: int, section: DataSection) -> str:
    """The limit that a prompt exceeds; empty if it fits. Raises DataError if the prompt is empty."""
    if not tokens:
        raise DataError("the prompt is empty; at least one token is needed to continue from")
    return _prompt(tokens, section)


def check_example(example: Example, section: DataSection) -> str:
    """The limit that a tokenised row exceeds; empty if it fits. Raises DataError if the row has no trained token."""
    for sequence in example.sequences:
        if len(sequence.ids) < 2:
            raise DataError("the row is empty: it has no token that could be learnt from what precedes it")
        if True not in sequence.loss_mask[1:]:
            raise DataError("no token of the row is trained on: its answer is empty")
        problem = _prompt(sequence.loss_mask.index(True), section)
        if problem:
            return problem
        if len(sequence.ids) > section.max_tokens:
            return f"the row has {len(sequence.ids)} tokens, over data.max_tokens = {section.max_tokens}"
    return ""


def _prompt(tokens: int, section: DataSection) -> str:
    if section.max_prompt_tokens is not None and tokens > section.max_prompt_tokens:
        return f"the prompt has {tokens} tokens, over data.max_prompt_tokens = {section.max_prompt_tokens}"
    if tokens >= section.max_tokens:
        return f"the prompt has {tokens} tokens; data.max_tokens = {section.max_tokens} leaves no room to answer"
    return ""


def check_labels(sources: Sequence[Source], columns: Sequence[str], drop: bool) -> None:
    """Read the labels of all training rows once.

    Args:
        columns: the column of labels of each source.
        drop: whether rows with invalid labels are left out later. Otherwise they are refused here.

    Raises DataError: an invalid label (the first one, with file and line), or labels of one kind only.
    """
    counts: Counter[bool | None] = Counter()
    for source, column in zip(sources, columns, strict=True):
        for index, value in enumerate(source.values(column)):
            label = as_label(value)
            counts[label] += 1
            if label is None and not drop:
                advice = 'Correct it, or set data.bad_rows = "drop" to drop and count such rows.'
                if all(as_label(other) is None for other in source.values(column)):
                    advice = (
                        "No value of the column is a label: write true or false instead, or name another column with "
                        "--data.label."
                    )
                raise DataError(
                    f"{source.location(index)}: column {column!r}: a label must be true or false, 1 or 0, '+' or '-', "
                    f"got {brief(value)}. {advice}"
                )
    if not (counts[True] and counts[False]):
        neither = f", and {counts[None]} values are not labels" if counts[None] else ""
        raise DataError(
            f"the training data has labels of one kind only: {counts[True]} rows are labelled true and "
            f"{counts[False]} false{neither}. Learning from labels needs both; is {columns[0]!r} the right column? "
            "Name another column with --data.label."
        )
