"""Samples as lines of text, shown while a run trains."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf.samples import Sample, first_samples
from rlhf.types import Group

LONG = 400
"""A text with more characters than this is shortened."""


def printable(text: str) -> str:
    """``text`` with control characters escaped, so that a model's output cannot control the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def shortened(text: str, limit: int | None = LONG) -> str:
    """``text``. If it is longer than ``limit``, its start and its end, with the number of characters left out.
    ``limit`` None: the whole text."""
    if limit is None or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def best_and_worst(groups: Sequence[Group]) -> list[tuple[str, Sample]]:
    """The samples with the highest reward (titled ``best``) and the lowest (``worst``). Among equal samples the last is
    the best and the first the worst, so that two are shown. If no sample has a reward, the first two samples."""
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
