"""Samples as lines of text, for people to look at while a run is at work."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.samples import Sample, first_samples
from rlhf.types import Group

LONG = 400
"""Characters of a text that are shown of a longer one."""


def printable(text: str) -> str:
    """``text`` with control characters as escapes: what a model writes must not steer the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def shortened(text: str, limit: int | None = LONG) -> str:
    """``text``, or of a longer one its front and its end with the number of characters between. None: whole."""
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def best_and_worst(groups: Sequence[Group]) -> list[tuple[str, Sample]]:
    """``best`` and ``worst`` of the samples by their reward, equal ones in order. Where nothing scored them: the first
    two, without a title."""
    samples = first_samples(groups, sum(len(group.trajectories) for group in groups))
    scored = sorted((s for s in samples if s.reward is not None), key=lambda s: s.reward or 0.0)
    if not scored:
        return [("sample", sample) for sample in samples[:2]]
    return [("best", scored[-1]), ("worst", scored[0])][: len(scored)]


def sample_lines(title: str, sample: Sample) -> str:
    """Title, reward, length and status in one line, then prompt and completion."""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    head = (
        f"{title}: {reward}{f' ({sample.rewards})' if sample.rewards else ''}, {sample.tokens} tokens, {sample.status}"
    )
    texts = {"prompt": sample.prompt, "completion": sample.completion}
    return "\n".join([head, *(f"  {name}: {_indented(text)}" for name, text in texts.items())])


def _indented(text: str) -> str:
    return shortened(printable(text)).replace("\n", "\n    ")
