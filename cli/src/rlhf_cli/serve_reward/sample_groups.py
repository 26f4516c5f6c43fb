"""Converts requests to groups of samples, as in a run, and their scores to an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.errors import DataError, brief, did_you_mean
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_runtime.data.text_tokens import TextTokens

KEYS = ("query", "prompts", "labels")


class BadQuestion(Exception):
    """The request is invalid. The message tells the client what to change."""


@dataclass(frozen=True, slots=True)
class Question:
    """Samples to score."""

    prompts: list[str]
    completions: list[str]
    labels: list[Any] | None
    """JSON values; None if the client sent none."""

    @classmethod
    def read(cls, body: bytes) -> Question:
        """``{"query": [prompt + completion, ...], "prompts": [...], "labels": [...]}``; ``labels`` may be absent.

        Raises BadQuestion for anything else.
        """
        try:
            body_json = json.loads(body, parse_constant=_refuse, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise BadQuestion(f"the body is not JSON: {error}") from None
        if not isinstance(body_json, dict):
            raise BadQuestion(f"the body is {brief(body_json)}; expected an object with the keys {', '.join(KEYS)}")
        for key in body_json:
            if key not in KEYS:
                raise BadQuestion(f"unknown key {key!r}; allowed: {', '.join(KEYS)}.{did_you_mean(key, KEYS)}")
        queries, prompts = (_texts(body_json, key) for key in ("query", "prompts"))
        labels = body_json.get("labels")
        if "labels" in body_json and not isinstance(labels, list):
            raise BadQuestion(
                f"labels is {brief(labels)}; expected a list with one label per query, or no key 'labels'"
            )
        for key, values in (("prompts", prompts), ("labels", labels)):
            if values is not None and len(values) != len(queries):
                raise BadQuestion(
                    f"{len(queries)} texts in query, but {len(values)} values in {key}; expected equal numbers"
                )
        for n, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
            if not query.startswith(prompt):
                raise BadQuestion(
                    f"query[{n}] does not begin with prompts[{n}], so where the answer begins is unknown: query[{n}] "
                    f"is {brief(query)}, prompts[{n}] is {brief(prompt)}"
                )
        return cls(prompts, [q[len(p) :] for q, p in zip(queries, prompts, strict=True)], labels)

    def __len__(self) -> int:
        return len(self.prompts)


def _texts(body_json: dict[str, Any], key: str) -> list[str]:
    if key not in body_json:
        raise BadQuestion(
            f"the key {key!r} is missing."
            + (' Rewards read only the answer. To score a whole query as the answer, send "" as its prompt.'
               if key == "prompts" else "")
        )  # fmt: skip
    values = body_json[key]
    if not isinstance(values, list) or not values:
        raise BadQuestion(f"{key} is {brief(values)}; expected a list of at least one text")
    for n, value in enumerate(values):
        if not isinstance(value, str):
            raise BadQuestion(f"{key}[{n}] is {brief(value)}; expected text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadQuestion(f"{key}[{n}] contains half of a character: an unpaired surrogate") from None
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses repeated keys, of which Python would silently keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadQuestion(f"the key {repeated!r} occurs {keys.count(repeated)} times in one object; allowed: once")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")


SOURCE = "request"
"""The source of the rows, in messages."""


class Unscored(Exception):
    """Samples that have no reward, with their causes."""

    def __init__(self, causes: dict[int, str]) -> None:
        n, cause = next(iter(causes.items()))
        count = f" ({len(causes)} samples have no reward)" if len(causes) > 1 else ""
        super().__init__(f"query[{n}]: {cause}{count}")
        self.causes = causes


class SampleGroups:
    """Creates groups from questions. The samples of a question with the same prompt and label are a group.

    A sample is a prompt and one answer. Its row has the column ``prompt`` and, if labels were sent, the column of the
    label.

    Args:
        tokenizer: None: turns have no tokens, and their texts are those that were sent. Else they have the tokens of
            these texts, and their texts have no special tokens, as in a run.
        column: column of the label; None: both ``label`` and ``answer``.
        add_eos: whether the end token is added to an answer that does not end with it.
        longest: largest number of tokens of a sample.
    """

    def __init__(self, tokenizer: Any, column: str | None, add_eos: bool, longest: int) -> None:
        self._tokenizer, self._add_eos, self._longest = tokenizer, add_eos, longest
        self._tokens = None if tokenizer is None else TextTokens(tokenizer)
        self._columns = ("label", "answer") if column is None else (column,)

    def groups(self, question: Question) -> tuple[list[Group], list[Trajectory]]:
        """The groups, and all samples in the order of the question.

        Raises Unscored for samples that cannot be tokenised or are too long.
        """
        groups: dict[str, Group] = {}
        samples: list[Trajectory] = []
        causes: dict[int, str] = {}
        for n, (prompt, completion) in enumerate(zip(question.prompts, question.completions, strict=True)):
            label = [] if question.labels is None else [question.labels[n]]
            key = json.dumps([prompt, *label], sort_keys=True)
            if key not in groups:
                columns = {"prompt": prompt} | {column: value for column in self._columns for value in label}
                groups[key] = Group(Row(columns, SOURCE, len(groups)), len(groups), [])
            group = groups[key]
            try:
                turns = self._turns(prompt, completion)
            except DataError as error:
                causes[n] = str(error)
                continue
            samples.append(Trajectory(group.row, turns, (group.number, len(group.trajectories))))
            group.trajectories.append(samples[-1])
        if causes:
            raise Unscored(causes)
        return list(groups.values()), samples

    def _turns(self, prompt: str, completion: str) -> list[Turn]:
        if self._tokens is None:
            return _prompt_and_answer(([], prompt), ([], completion))
        prompt_ids, answer = self._tokens.ids(prompt), self._tokens.ids_after(prompt, completion)
        prompt_ids = [*self._tokens.begin(prompt_ids or answer), *prompt_ids]
        end = self._tokenizer.eos_token_id
        if self._add_eos and answer[-1:] != [end]:
            answer = [*answer, end]
        if len(prompt_ids) + len(answer) > self._longest:
            raise DataError(
                f"{len(prompt_ids) + len(answer)} tokens are more than data.max_tokens = {self._longest}. Start the "
                "server with a larger --data.max_tokens, if the model allows it."
            )
        return _prompt_and_answer((prompt_ids, self._decode(prompt_ids)), (answer, self._decode(answer)))

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _prompt_and_answer(prompt: tuple[list[int], str], answer: tuple[list[int], str]) -> list[Turn]:
    return [
        Turn(prompt[0], sampled=False, text=prompt[1]),
        Turn(answer[0], sampled=True, finish="stop", text=answer[1], is_demonstration=True),
    ]


def answer_of(samples: Sequence[Trajectory], sources: Sequence[str]) -> dict[str, Any]:
    """``{"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}`` of scored samples.

    The logs are the numbers in a reward's ``info`` and, with several rewards, the value of each under its name, if all
    samples have them.

    Raises Unscored if a sample failed, or no reward applies to it.
    """
    causes: dict[int, str] = {}
    for n, sample in enumerate(samples):
        if sample.status == "failed":
            causes[n] = sample.error
        elif sample.reward is None or sample.score is None:
            causes[n] = "no reward applies to this sample"
    if causes:
        raise Unscored(causes)
    logs = [_logs(sample, len(sources) > 1) for sample in samples]
    common = [name for name in logs[0] if all(name in log for log in logs)]
    return {
        "rewards": [sample.reward for sample in samples],
        "scores": [sample.score for sample in samples],
        "extra_logs": {name: [log[name] for log in logs] for name in common},
    }


def _logs(sample: Trajectory, has_prefix: bool) -> dict[str, float]:
    log: dict[str, float] = {}
    for source, result in sample.rewards.items():
        if has_prefix and (value := result.total) is not None:
            log[source] = value
        for key, value in result.info.items():
            if type(value) in (int, float) and math.isfinite(value):
                log[f"{source}/{key}" if has_prefix else key] = value
    return log
