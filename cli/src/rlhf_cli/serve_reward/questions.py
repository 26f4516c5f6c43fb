"""What a client asks, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlhf.errors import did_you_mean, shown

KEYS = ("query", "prompts", "labels")


class BadQuestion(Exception):
    """The client must ask otherwise. The message says how."""


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
            raise BadQuestion(f"the body is {shown(body_json)}; expected an object with the keys {', '.join(KEYS)}")
        for key in body_json:
            if key not in KEYS:
                raise BadQuestion(f"unknown key {key!r}; allowed: {', '.join(KEYS)}.{did_you_mean(key, KEYS)}")
        queries, prompts = (_texts(body_json, key) for key in ("query", "prompts"))
        labels = body_json.get("labels")
        if "labels" in body_json and not isinstance(labels, list):
            raise BadQuestion(f"labels is {shown(labels)}; expected a list with one label per query, or no such key")
        for key, values in (("prompts", prompts), ("labels", labels)):
            if values is not None and len(values) != len(queries):
                raise BadQuestion(f"{len(queries)} texts in query, but {len(values)} values in {key}; expected as many")
        for n, (query, prompt) in enumerate(zip(queries, prompts, strict=True)):
            if not query.startswith(prompt):
                raise BadQuestion(
                    f"query[{n}] does not begin with prompts[{n}], so where the answer begins is unknown: query[{n}] "
                    f"is {shown(query)}, prompts[{n}] is {shown(prompt)}"
                )
        return cls(prompts, [q[len(p) :] for q, p in zip(queries, prompts, strict=True)], labels)

    def __len__(self) -> int:
        return len(self.prompts)


def _texts(body_json: dict[str, Any], key: str) -> list[str]:
    if key not in body_json:
        raise BadQuestion(
            f"the key {key!r} is missing."
            + (' Rewards read the answer alone. To have all of a query taken as the answer, send "" as its prompt.'
               if key == "prompts" else "")
        )  # fmt: skip
    values = body_json[key]
    if not isinstance(values, list) or not values:
        raise BadQuestion(f"{key} is {shown(values)}; expected a list of at least one text")
    for n, value in enumerate(values):
        if not isinstance(value, str):
            raise BadQuestion(f"{key}[{n}] is {shown(value)}; expected text")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadQuestion(f"{key}[{n}] holds half of a character: a surrogate without the other") from None
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python would keep the last of several values without a word."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise BadQuestion(f"the key {repeated!r} occurs {keys.count(repeated)} times in one object; allowed: once")
    return fields


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is a number that is not finite")
