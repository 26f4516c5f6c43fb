"""Recorded answers as rows of data: pairs, best of n, labels, demonstrations, scored and reward-conditioned rows.

Each function takes answers by prompt. It returns the rows, and {reason: number} of the answers and prompts that it left
out. This project and TRL recognise the column names without options. If the prompt is a list of messages, answers are
lists of one message. Otherwise they are text. Rows have the column ``images`` if texts of their prompts have
placeholders of images.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.errors import ConfigError, DataError

from rlhf_runtime.data.recorded_answers import Prompt, RecordedAnswer

Groups = Sequence[Sequence[RecordedAnswer]]

CONDITION = "{prompt} <rm_score>: {reward:.2f} "
"""Default position of the reward in the prompt, as in OpenRLHF."""


@dataclass(slots=True)
class ExportedRows:
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def pairs(groups: Groups, min_gap: float = 0.0) -> ExportedRows:
    """The best and the worst answer of each prompt (among equal answers, the lowest sample number): ``prompt``,
    ``chosen``, ``rejected``, ``score_chosen``, ``score_rejected``.

    Left out: prompts with fewer than two scored answers, prompts whose scores differ by no more than ``min_gap`` (by
    default: tie), and pairs of equal texts.
    """
    export = ExportedRows()
    for group in _scored(groups, export):
        if len(group) < 2:
            export.left_out["prompts with fewer than two scored answers"] += 1
            continue
        best, worst = _ranked(group)[0], min(group, key=lambda a: (_score(a), a.sample))
        if not _score(best) - _score(worst) > min_gap:
            export.left_out["prompts whose answers tie"] += 1
        elif best.completion == worst.completion:
            export.left_out["prompts whose best and worst answers are equal texts"] += 1
        else:
            chosen, rejected = _completion(best), _completion(worst)
            row = {**_question(best), "chosen": chosen, "rejected": rejected}
            export.rows.append({**row, "score_chosen": _score(best), "score_rejected": _score(worst)})
    return export


def best(groups: Groups, keep: int = 1, min_reward: float | None = None) -> ExportedRows:
    """The ``keep`` best answers of each prompt (among equal answers, the lowest sample numbers): ``prompt``,
    ``completion``, ``reward``. Equal texts count as one answer. Answers below ``min_reward`` are not kept."""
    export = ExportedRows()
    for group in _scored(groups, export):
        passing = [a for a in group if min_reward is None or _score(a) >= min_reward]
        answers: dict[str, RecordedAnswer] = {}
        for answer in _ranked(passing):
            answers.setdefault(answer.completion, answer)
        if group and not answers:
            export.left_out["prompts without an answer that reaches min_reward"] += 1
        export.rows += [{**_row(a), "reward": _score(a)} for a in [*answers.values()][:keep]]
    return export


def labels(groups: Groups, threshold: float = 1.0) -> ExportedRows:
    """Every scored answer: ``prompt``, ``completion``, ``label`` (whether its reward is at least ``threshold``)."""
    export = ExportedRows()
    export.rows = [{**_row(a), "label": _score(a) >= threshold} for group in _scored(groups, export) for a in group]
    return export


def demonstrations(groups: Groups) -> ExportedRows:
    """Every answer, scored or not: ``prompt``, ``completion``."""
    return ExportedRows([_row(a) for group in groups for a in group])


def scored(groups: Groups) -> ExportedRows:
    """Every scored answer: ``prompt``, ``completion``, ``reward``."""
    export = ExportedRows()
    export.rows = [{**_row(a), "reward": _score(a)} for group in _scored(groups, export) for a in group]
    return export


def conditional(groups: Groups, condition: str = CONDITION) -> ExportedRows:
    """Every scored answer, with its reward written into the prompt: ``prompt``, ``completion``, ``reward``.

    Rewards are z-scores over all answers, with the unbiased standard deviation. ``condition`` is the format of a plain
    prompt with its reward. If prompts are messages, the same text without the prompt becomes the system message, or its
    last line.

    Raises ConfigError (the condition) or DataError (fewer than two rewards, or all rewards are equal).
    """
    export = ExportedRows()
    answers = [a for group in _scored(groups, export) for a in group]
    rewards = [_score(a) for a in answers]
    if len(set(rewards)) < 2:
        amount = "1 reward" if len(rewards) == 1 else f"{len(rewards)} rewards{', all equal,' if rewards else ''}"
        raise DataError(
            f"{amount} cannot be normalised: rewards in the prompt distinguish answers only if they differ. "
            "Score with another reward, or draw more samples."
        )
    mean, deviation = math.fsum(rewards) / len(rewards), statistics.stdev(rewards)
    for answer, reward in zip(answers, rewards, strict=True):
        z = (reward - mean) / deviation
        question = _question(answer) | {"prompt": conditioned(answer.prompt, z, condition)}
        export.rows.append({**question, "completion": _completion(answer), "reward": z})
    return export


def conditioned(prompt: Prompt, reward: float, condition: str = CONDITION) -> Prompt:
    """The prompt with the reward in it. Raises ConfigError for a condition without the field ``{reward}``, without
    ``{prompt}`` if the prompt is text, or with other fields."""
    try:
        text = condition.format(prompt=prompt if isinstance(prompt, str) else "", reward=reward)
        shows = condition.format(prompt="", reward=1.0) != condition.format(prompt="", reward=-9.0)
        has_prompt = condition.format(prompt="a", reward=reward) != condition.format(prompt="b", reward=reward)
    except (LookupError, ValueError, AttributeError, TypeError) as cause:
        raise ConfigError(
            f"the condition {condition!r} cannot be filled in: {type(cause).__name__} {cause}. It may name {{prompt}} "
            f"and {{reward}}, e.g. {CONDITION!r}"
        ) from None
    if not shows:
        raise ConfigError(f"the condition {condition!r} does not contain the reward; use e.g. {CONDITION!r}")
    if isinstance(prompt, str) and not has_prompt:
        raise ConfigError(
            f"the condition {condition!r} does not contain the prompt, so rows would lose it; use e.g. {CONDITION!r}"
        )
    if isinstance(prompt, str):
        return text
    text = text.strip()
    first = prompt[0]
    if first["role"] == "system":
        content = first["content"]
        # In parts that contain an image, the text becomes another part.
        longer = f"{content}\n{text}" if isinstance(content, str) else [*content, {"type": "text", "text": f"\n{text}"}]
        return [{**first, "content": longer}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def _scored(groups: Groups, export: ExportedRows) -> list[list[RecordedAnswer]]:
    export.left_out["answers without a reward"] = sum(a.reward is None for group in groups for a in group)
    return [[a for a in group if a.reward is not None] for group in groups]


def _ranked(group: Sequence[RecordedAnswer]) -> list[RecordedAnswer]:
    return sorted(group, key=lambda a: (-_score(a), a.sample))


def _score(answer: RecordedAnswer) -> float:
    assert answer.reward is not None
    return answer.reward


def _row(answer: RecordedAnswer) -> dict[str, Any]:
    return {**_question(answer), "completion": _completion(answer)}


def _question(answer: RecordedAnswer) -> dict[str, Any]:
    return {"prompt": answer.prompt, **({"images": [*answer.images]} if answer.images else {})}


def _completion(answer: RecordedAnswer) -> str | list[dict[str, str]]:
    if isinstance(answer.prompt, str):
        return answer.completion
    return [{"role": "assistant", "content": answer.completion}]
