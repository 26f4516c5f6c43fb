"""Solutions with labelled steps in the layouts of published data sets.

:data:`SHAPES` lists the columns, one shape per line. :data:`STEP_CONVERSIONS` describes the meaning of their values. A
step with :data:`NO_LABEL` is read by the model and not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeGuard

from rlhf.errors import DataError, brief

from rlhf_runtime.data.comparisons import Values
from rlhf_runtime.data.conversions import required_list, text_value

MARK = "ки"
"""Marker after each step of Math-Shepherd (Wang et al. 2023, arXiv:2312.08935)."""
NO_LABEL: Any = ...
"""Label of a step that nobody judged. Values in rows are never this object: null in a list of labels is refused."""
RATINGS: Mapping[Any, Any] = {-1: 0, 0: 1, 1: 1, None: NO_LABEL}
"""PRM800K's ratings as labels; a neutral step counts as right, as in Lightman et al. 2023, arXiv:2305.20050."""
_TEXTS = ("text", "content", "step")
_LABELS = ("label", "score")
_HUMAN_COMPLETION = "human_completion"
"""Field of a PRM800K step: the completion that a person wrote because no sampled one was acceptable."""


# -------------------------------------------------------------------------------------- conversions


def marked_steps(values: Values, chat: bool) -> Values:
    """Math-Shepherd: the problem and its steps in one text with ``ки`` after each step; labels are a list, or the same
    text with a label instead of each mark. The prompt is the text before ``Step 1:``; with a chat template, without
    white space around it."""
    text = text_value(values, "steps")
    *pieces, rest = text.split(MARK)
    if not pieces or rest.strip():
        raise DataError(f"a step has no mark {MARK!r} after it: {rest.strip()[:60]!r}")
    labels = values.get("step_labels")
    if isinstance(labels, str):
        labels = _labels_in_place(pieces, labels)
    problem, start, first = pieces[0].partition("Step 1:")
    if not start:
        raise DataError(f"no 'Step 1:' before the first mark {MARK!r}, so the end of the problem cannot be found")
    steps = [start + first, *pieces[1:]]
    prompt = problem.strip() if chat else problem
    return {**values, "prompt": prompt, "steps": [s.strip() for s in steps], "step_labels": labels}


def rated_steps(values: Values, chat: bool) -> Values:
    """A list of ``{text, rating}`` with ratings of -1, 0, 1 as in PRM800K, or of ``{text, label or score}``."""
    steps = [s if isinstance(s, Mapping) else {} for s in required_list(values, "steps")]
    texts = [next((s[k] for k in _TEXTS if k in s), None) for s in steps]
    labels = [_rating(s["rating"]) if "rating" in s else next((s[k] for k in _LABELS if k in s), None) for s in steps]
    return {**values, "steps": texts, "step_labels": labels}


def prm800k(values: Values, chat: bool) -> Values:
    """PRM800K as published: for each step the chosen completion, or the human-written one, or the wrong completion that
    ends the solution. Other completions of a step are not used. A last step without any completion was not written, and
    is left out."""
    question, label = values.get("prompt"), values.get("steps")
    if not isinstance(question, Mapping) or not isinstance(label, Mapping) or not isinstance(label.get("steps"), list):
        raise DataError("must have question.problem and label.steps, as in PRM800K")
    texts, labels = list[Any](), list[Any]()
    for number, step in enumerate(label["steps"], 1):
        if not isinstance(step, Mapping):
            raise DataError(f"step {number}: must have completions, got {brief(step)}")
        completions, human = step.get("completions") or [], step.get(_HUMAN_COMPLETION)
        if not isinstance(completions, list) or not all(isinstance(c, Mapping) for c in (*completions, human or {})):
            raise DataError(f"step {number}: each completion must be {{text, rating}}, got {brief(completions)}")
        chosen = step.get("chosen_completion")
        completion = completions[chosen] if isinstance(chosen, int) and 0 <= chosen < len(completions) else human
        if completion is None and number == len(label["steps"]) and (completions or texts):
            completion = completions[0] if completions else None
            if completion is None:
                break
        if completion is None:
            raise DataError(f"step {number}: no completion was chosen")
        texts.append(completion.get("text"))
        labels.append(1 if completion is human else _rating(completion.get("rating")))
    return {"prompt": question.get("problem"), "steps": texts, "step_labels": labels}


def first_wrong(values: Values, chat: bool) -> Values:
    """The index of the first wrong step, from 0, or -1 (ProcessBench, Zheng et al. 2024, arXiv:2412.06559). Later steps
    have no label: process supervision ends at the first wrong step (Lightman et al. 2023, arXiv:2305.20050, 2.6)."""
    steps, index = required_list(values, "steps"), values.get("step_labels")
    if not is_index(index) or not -1 <= index < len(steps):
        raise DataError(
            f"the label must be the index of the first wrong step (of {len(steps)}), or -1 if no step is wrong, "
            f"got {index!r}"
        )
    labels: list[Any] = [1] * len(steps) if index == -1 else [1] * index + [0] + [NO_LABEL] * (len(steps) - index - 1)
    return {**values, "step_labels": labels}


def wrong_steps(values: Values, chat: bool) -> Values:
    """The numbers of all wrong steps, from 1 (PRMBench, Song et al. 2025, arXiv:2501.03124)."""
    steps, numbers = required_list(values, "steps"), values.get("step_labels")
    if not isinstance(numbers, list) or not all(is_index(n) and 1 <= n <= len(steps) for n in numbers):
        raise DataError(f"must be a list of the numbers of wrong steps (1 to {len(steps)}), got {brief(numbers)}")
    return {**values, "step_labels": [int(number not in numbers) for number in range(1, len(steps) + 1)]}


def _labels_in_place(pieces: list[str], text: str) -> list[str]:
    labels, position = list[str](), 0
    for number, piece in enumerate(pieces, 1):
        if not text.startswith(piece, position):
            raise DataError(f"step {number}: the text of the labels differs from the text of the steps before the mark")
        position += len(piece)
        labels.append(text[position : position + 1])
        position += 1
    if text[position:].strip():
        raise DataError(f"the text of the labels continues after the last step: {text[position : position + 60]!r}")
    return labels


def _rating(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | None) or value not in RATINGS:
        raise DataError(f"a rating must be -1 (wrong), 0 (neutral) or 1 (right), got {value!r}")
    return RATINGS[value]


STEP_CONVERSIONS: Mapping[str, tuple[str, Callable[[Values, bool], Values]]] = {
    "marked_steps": (
        f"steps end at {MARK!r}, where their labels are; the prompt is the text before 'Step 1:'",
        marked_steps,
    ),
    "rated_steps": ("a list of steps with their ratings or labels", rated_steps),
    "prm800k": ("PRM800K: the chosen completion of each step; neutral ratings count as right", prm800k),
    "first_wrong": ("the index of the first wrong step, from 0, or -1; later steps have no label", first_wrong),
    "wrong_steps": ("the numbers of the wrong steps, from 1; all others are right", wrong_steps),
}
"""{conversion: (words for messages, function of the values and of whether a chat template is used)}."""


# ------------------------------------------------------------------- what a value looks like


def is_rated(value: Any) -> bool:
    """``[{text, rating or label}, ...]``."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(s, Mapping) and any(k in s for k in _TEXTS) for s in value)
        and all(any(k in s for k in ("rating", *_LABELS)) for s in value)
    )


def is_prm800k(question: Any, label: Any) -> bool:
    return isinstance(question, Mapping) and "problem" in question and isinstance(label, Mapping) and "steps" in label


def is_index(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# ------------------------------------------------------------------------------------------- shapes


@dataclass(frozen=True)
class StepShape:
    """The columns of rows with labelled steps, and how their values are read."""

    conversion: str
    """A name in :data:`STEP_CONVERSIONS`; empty: values are not converted."""
    steps: tuple[str, ...]
    """Common names of the column of steps. They are used if the run file names none and the default column is
    absent."""
    labels: tuple[str, ...]
    """The same for the column of labels. Empty: the labels are in the column of steps."""
    fits: Callable[[Mapping[str, Any], str, str], bool]
    """Whether a source has this shape, by its first row and the columns of steps and of labels."""
    prompt: str | None = None
    """Column with the prompt. Empty: it is in the column of steps. None: the same columns as in other layouts."""
    companion: str = ""
    """Another column that must exist. Without it, the labels could mean something else, so the run file must name
    them."""

    def columns(
        self, row: Mapping[str, Any], names: Mapping[str, str], choices: Callable[..., Sequence[str]]
    ) -> Iterator[Mapping[str, str]]:
        """{field: column} of the steps and their labels, for every choice that fits.

        Args:
            names: {field: column} as the run file names them.
            choices: the columns that a field may mean, by the field and the common names of its column.
        """
        if self.companion and self.companion not in row and "step_labels" not in names:
            return
        for steps, label in product(
            choices("steps", self.steps), choices("step_labels", self.labels) if self.labels else [""]
        ):
            if self.fits(row, steps, label):
                yield {"steps": steps} | ({"step_labels": label} if label else {})


SHAPES = (
    StepShape("rated_steps", ("steps", "steps_with_score"), (), lambda row, steps, labels: is_rated(row.get(steps))),
    StepShape("marked_steps", ("steps", "input"), ("step_labels", "label", "value"),
              lambda row, steps, labels: isinstance(text := row.get(steps), str) and MARK in text, prompt=""),
    StepShape("wrong_steps", ("modified_process",), ("error_steps",),
              lambda row, steps, labels: labels == "error_steps", prompt="modified_question"),
    StepShape("first_wrong", ("steps",), ("label",),
              lambda row, steps, label: is_index(row.get(label)), companion="final_answer_correct"),
    StepShape("prm800k", ("label",), (), lambda row, steps, labels: is_prm800k(row.get("question"), row.get(steps)),
              prompt="question"),
    StepShape("", ("steps", "input"), ("step_labels", "ratings"),
              lambda row, steps, labels: steps != "input" or isinstance(row.get(steps), list)),
)  # fmt: skip
"""The first shape that fits is used."""
