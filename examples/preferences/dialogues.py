"""HH's pairs of dialogues as a shared prompt and two last answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"


def split(dialogue: str) -> tuple[str, str]:
    """(everything up to and including the last `Assistant:`, the answer after it, its leading space kept)."""
    before, turn, answer = dialogue.rpartition(ASSISTANT)
    return before + turn, answer.rstrip()


def opening(prompt: str) -> str:
    """The first human message: conversations with the same first message belong to the same side of a split."""
    return prompt.removeprefix(HUMAN).partition(ASSISTANT)[0].strip()


def pairs(rows: Iterable[Mapping[str, str]], left_out: Counter[str]) -> Iterator[dict[str, str]]:
    """Rows with `prompt`, `chosen`, `rejected`. Dialogues that are not a valid pair are left out and counted by the
    reason."""
    for row in rows:
        (prompt, chosen), (other, rejected) = split(row["chosen"]), split(row["rejected"])
        if prompt != other:  # the dialogues differ before their last answers
            left_out["different prompts"] += 1
        elif not chosen.strip() or not rejected.strip():
            left_out["empty answer"] += 1
        elif chosen == rejected:
            left_out["equal answers"] += 1
        else:
            yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
