"""A recorded sample as text for a terminal."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text
from rlhf_runtime.observe.sample_lines import printable, shortened
from rlhf_runtime.report.recorded_samples import RecordedSample, message_text

from rlhf_cli.runs.curves import number

LONG = 1200
"""Number of characters of a long text that are shown."""
INDENT = "  "


def sample_text(sample: RecordedSample, heading: str = "", full: bool = False) -> Text:
    """The sample with its prompt and its turns.

    Args:
        heading: text before the sample's number.
        full: do not shorten long texts, and do not leave out counts of the rollout that are 0.
    """
    limit = None if full else LONG
    agent = f" as {sample.agent}" if sample.agent else ""
    identity = f"group {sample.group}, sample {sample.sample}{agent}, row {sample.row} of {sample.source!r}"
    text = Text.assemble((f"{heading}{identity}\n", "bold cyan"), _facts(sample), "\n")
    if numbers := _numbers(sample, full):
        text.append(f"{INDENT}{numbers}\n")
    for name, finding in sample.findings.items():
        words = "; ".join(f"{key} {_finding(value)}" for key, value in finding.items())
        text.append(f"{INDENT}{printable(name)}: {shortened(printable(words), limit)}\n")
    if sample.error:
        text.append(f"{INDENT}error: {printable(sample.error)}\n", "bold red")
    _add(text, "prompt", message_text(sample.prompt), limit, "dim")
    for turn in sample.turns:
        marks = "".join(
            f", {name} {number(value)}"
            for name, value in (("reward", turn.reward), ("score", turn.score))
            if value is not None
        )
        is_completion = len(sample.turns) == 1 and turn.speaker == "policy" and not marks
        title = "completion" if is_completion else f"{turn.speaker}, {turn.tokens} tokens{marks}"
        _add(text, title, message_text(turn.messages or turn.text), limit, "" if turn.speaker == "policy" else "dim")
    text.rstrip()
    return text


def _facts(sample: RecordedSample) -> str:
    """``reward 0.5 (mean of its group 0.25): math 1, length -0.2; truncated, 6 tokens``."""
    facts = f"{INDENT}reward {'none' if sample.reward is None else number(sample.reward)}"
    if sample.group_mean is not None:
        facts += f" (mean of its group {number(sample.group_mean)})"
    rewards = [f"{name} {'none' if value is None else number(value)}" for name, value in sample.rewards.items()]
    facts += f": {', '.join(rewards)}" if rewards else ""
    turns = sum(turn.speaker == "policy" for turn in sample.turns)
    facts += f"; {sample.status}, {sample.length} tokens" + (f" in {turns} turns" if turns > 1 else "")
    return facts + (", the answer is from the data" if sample.is_demonstration else "")


def _numbers(sample: RecordedSample, full: bool) -> str:
    """``env/right 1, rollout/sequences 2``."""
    numbers = {k: v for k, v in sample.info.items() if full or v or not k.startswith("rollout/")}
    return ", ".join(f"{printable(name)} {number(value)}" for name, value in numbers.items())


def _finding(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return number(value)


def _add(text: Text, title: str, body: str, limit: int | None, style: str) -> None:
    text.append(f"{INDENT}{title}\n", "bold")
    for line in shortened(printable(body), limit).split("\n"):
        text.append(f"{INDENT}{INDENT}{line}\n", style)
