"""Rows with several answers and a preference between them, as pairs: the best answer is chosen, the worst is rejected.

:data:`SHAPES` lists the columns of published data sets, one shape per line. :data:`PREFERENCES` describes the meaning
of their values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rlhf.errors import DataError, brief

from rlhf_runtime.data.strict_json import STRICT

Values = dict[str, Any]
"""{field: value} of one row."""

OF_MARGIN = "_margin"
"""End of a conversion's name: the margin is the difference of the two scores."""
_TEXTS = ("response", "answer", "completion", "text")
"""Fields that may contain the answer, if answers are a list of objects."""


@dataclass(frozen=True)
class Shape:
    """The columns of rows with several answers."""

    meaning: str
    """A name in :data:`PREFERENCES`."""
    answers: tuple[str, ...]
    """Two columns with one answer each, or one column with a list of objects."""
    preference: tuple[str, ...] = ()
    """Columns that say which answer is better. Without any, each object contains its score."""
    prompt: str | None = None
    """Column with the prompt. Empty: the answers are whole conversations. None: the same columns as in other
    layouts."""

    def fits(self, row: Mapping[str, Any], columns: Collection[str], names: Mapping[str, str]) -> bool:
        """Whether a source has the columns of this shape. ``row``: its first row."""
        if names.get("preference") not in (None, *self.preference):
            return False
        if not {*self.answers, *self.preference, names.get("margin") or self.answers[0]} <= {*columns}:
            return False
        answers, needed = row.get(self.answers[0]), () if self.preference else (self.meaning,)
        if len(self.answers) == 2 or not isinstance(answers, list) or not answers:
            return len(self.answers) == 2
        return all(isinstance(a, Mapping) and any(t in a for t in _TEXTS) and a.keys() >= {*needed} for a in answers)

    def layout(self, margin: str | None) -> tuple[dict[str, str], str]:
        """({field: column} without the prompt, name of the conversion). ``margin``: the column that the run file names
        as the margin."""
        fields_of_answers = ("first", "second") if len(self.answers) == 2 else ("answers",)
        columns = (*self.answers, *self.preference)
        fields = dict(zip((*fields_of_answers, *_PREFERENCE), columns, strict=False))
        if margin in (self.preference or self.answers):
            return {"margin" if c == margin else f: c for f, c in fields.items()}, self.meaning + OF_MARGIN
        return fields | ({"margin": margin} if margin is not None else {}), self.meaning


_PREFERENCE = ("preference", "other_preference")

SHAPES = (
    Shape("sign", ("response1", "response2"), ("overall_preference",), "context"),  # HelpSteer3
    Shape("sign", ("response_1", "response_2"), ("preference_strength",)),  # HelpSteer2-Preference
    Shape("index", ("response_0", "response_1"), ("better_response_id",)),  # PKU-SafeRLHF
    Shape("index", ("response_0", "response_1"), ("safer_response_id",)),
    Shape("first", ("human_ref_A", "human_ref_B"), ("labels",), "history"),  # SHP
    Shape("winner", ("conversation_a", "conversation_b"), ("winner",), ""),  # Chatbot Arena, MT-Bench
    Shape("winner", ("response_a", "response_b"), ("winner",)),
    Shape("votes", ("response_a", "response_b"), ("winner_model_a", "winner_model_b")),  # Chatbot Arena on Kaggle
    Shape("scores", ("answer_0", "answer_1"), ("score_0", "score_1")),  # WebGPT comparisons
    Shape("count", ("output_1", "output_2"), ("preference",)),  # AlpacaFarm
    Shape("index", ("summaries",), ("choice",), "info"),  # Summarize from feedback
    Shape("overall_score", ("completions",)),  # UltraFeedback
    Shape("rank", ("answers",)),  # Nectar
    Shape("rank", ("completions",), (), "context"),  # NeMo RL
)


def best_and_worst(values: Values, meaning: str, of_margin: bool) -> Values:
    """A row of a shape as a pair: ``chosen`` and ``rejected``, with its prompt and its margin if it has them.

    Args:
        of_margin: whether the margin is the difference of the scores. Then a column of the preference has the field
            ``margin``.

    Raises DataError: no answer is better than the others, or a value is invalid.
    """
    default = values.get("margin") if of_margin else None
    answers = values.get("answers", default) if "first" not in values else [values["first"], values.get("second")]
    if not isinstance(answers, list) or len(answers) < 2:
        raise DataError(f"there must be at least two answers, got {brief(answers)}")
    preference, other = (values.get(field, default) for field in _PREFERENCE)
    scores = _scores(meaning, preference, other, answers)
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if best == worst:
        raise DataError("no answer is better than the others (a tie), so there is no preference to learn")
    rest = {f: v for f, v in values.items() if f not in ("answers", "first", "second", *_PREFERENCE)}
    pair = {"chosen": _answer(answers[best]), "rejected": _answer(answers[worst])}
    margin = {"margin": scores[best] - scores[worst]} if of_margin else {}
    return (_turns({**rest, **pair}) if meaning == "votes" else {**rest, **pair, **_question(rest)}) | margin


def unequal_pairs(answers: Any, meaning: str) -> list[tuple[int, ...]]:
    """The positions of every pair of answers with different scores; empty if the scores cannot be read."""
    try:
        scores = _scores(meaning, None, None, answers) if isinstance(answers, list) else []
    except DataError:
        return []
    return [(i, j) for i, j in combinations(range(len(scores)), 2) if scores[i] != scores[j]]


PREFERENCES = {
    "sign": "below 0 the first answer is better, above 0 the second",
    "index": "the number of the better answer, from 0",
    "count": "the number of the better answer, from 1",
    "first": "1 where the first answer is better, 0 where the second is",
    "winner": "the name of the better answer: model_a or model_b",
    "votes": "the answer with more votes is better; prompt and answers are lists of turns",
    "scores": "the answer with the higher score is better",
    "overall_score": "the answers with the highest and the lowest overall_score",
    "rank": "the answers with the lowest and the highest rank",
}
"""{meaning: words for messages}."""


def _scores(meaning: str, preference: Any, other: Any, answers: list[Any]) -> list[float]:
    """The scores of the answers. Raises DataError.

    Args:
        preference, other: the values of the columns of the preference.
    """
    match meaning:
        case "sign":
            return [0.0, _number(preference)]
        case "index":
            return _better(_number(preference), preference, answers)
        case "count":
            return _better(_number(preference) - 1, preference, answers)
        case "first":
            return _better(1 - _number(preference), preference, answers)
        case "winner":
            name = str(preference).strip().lower()
            if name.startswith("tie") or name == "both_bad":
                return [0.0, 0.0]
            return _better({"model_a": 0, "a": 0, "model_b": 1, "b": 1}.get(name, -1), preference, answers)
        case "votes" | "scores":
            return [_number(preference), _number(other)]
    if not all(isinstance(a, Mapping) for a in answers):
        raise DataError(f"each answer must be an object with its text and score, got {brief(answers)}")
    sign = -1 if meaning == "rank" else 1
    return [sign * _number(answer.get(meaning)) for answer in answers]


# ------------------------------------------------------------------------------------ values of a row


def _better(index: float, preference: Any, answers: list[Any]) -> list[float]:
    if index not in range(len(answers)):
        raise DataError(f"{brief(preference)} does not say which of {len(answers)} answers is better")
    return [float(number == index) for number in range(len(answers))]


def _number(value: Any) -> float:
    try:
        number = float(value)  # csv files hold text
    except (TypeError, ValueError, OverflowError):  # the last of an integer with hundreds of digits
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"a preference, score or rank must be a finite number, got {brief(value)}")
    return number


def _answer(answer: Any) -> Any:
    return next((answer[t] for t in _TEXTS if t in answer), None) if isinstance(answer, Mapping) else answer


def _turns(values: Values) -> Values:
    """Prompt and answers that are the JSON of a list of turns: texts if there is one turn, else conversations."""
    fields = ("prompt", "chosen", "rejected")
    try:
        prompts, *answers = (STRICT.decode(values[f]) for f in fields)
        lengths = {len(prompts), *map(len, answers)}
    except (KeyError, TypeError, ValueError, RecursionError):
        lengths = set()
    if len(lengths) != 1 or not all(isinstance(v, list) for v in (prompts, *answers)):
        raise DataError("prompt and answers must be JSON lists with the same number of turns")
    if lengths == {1}:
        return {**values, **{f: v[0] for f, v in zip(fields, (prompts, *answers), strict=True)}}
    talks = [[m for turn in zip(prompts, a, strict=True) for m in question_and_answer(*turn)] for a in answers]
    return {f: v for f, v in values.items() if f != "prompt"} | dict(zip(fields[1:], talks, strict=True))


def question_and_answer(question: Any, answer: Any) -> list[dict[str, Any]]:
    """Two messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _question(values: Values) -> Values:
    """The prompt of WebGPT's questions, and of posts to summarise (Stiennon et al. 2020, arXiv:2009.01325, as their
    code writes it); empty for other prompts."""
    prompt = values.get("prompt")
    if not isinstance(prompt, Mapping):
        return {}
    if "full_text" in prompt:
        return {"prompt": prompt["full_text"]}
    if not isinstance(prompt.get("post"), str):
        raise DataError(f"the prompt must be text, messages, a question with full_text or a post, got {brief(prompt)}")
    subreddit, title, post = (prompt.get(field) for field in ("subreddit", "title", "post"))
    return {"prompt": f"SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"}
