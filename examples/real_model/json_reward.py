"""The reward of `json.toml`."""

import json


def score(prompt, completion, row):
    """Share of the keys that have the right value; further keys are wrong. 0 if the answer is not one JSON object."""
    try:
        answer = json.loads(completion)
    except (ValueError, RecursionError):  # a model may nest lists deeper than Python reads
        return 0.0
    if not isinstance(answer, dict):
        return 0.0
    right = row["answer"]
    return sum(key in right and answer[key] == right[key] for key in answer) / len(right | answer)
