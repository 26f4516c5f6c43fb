"""Recorded samples as plain answers: from a run's ``rollouts/``, or saved by `rlhf eval` and `rlhf generate`."""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, DataError

from rlhf_runtime.checkpoint.sample_table import SUFFIX
from rlhf_runtime.checkpoint.saved_groups import agent_of, recorded
from rlhf_runtime.data.image_files import data_url
from rlhf_runtime.data.messages import places
from rlhf_runtime.data.row_images import with_urls

Prompt = str | list[Mapping[str, Any]]
"""Text, or messages if a chat template was used."""


RECORDED = (
    "Recorded samples are in a run's rollouts/, and in what `rlhf eval --save`, `rlhf generate --save` and "
    "`rlhf score` write."
)


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One sampled answer to a prompt."""

    sample: int
    """Number of the sample among the answers to this prompt."""
    prompt: Prompt
    completion: str
    reward: float | None
    """None if it has no reward."""
    images: tuple[str, ...] = ()
    """The prompt's images as ``data:`` URLs, for a column, if placeholders in its texts stand for some of them.
    Otherwise the parts of its messages hold them."""


@dataclass(slots=True)
class RecordedAnswers:
    """Answers by prompt, in the order of the files, and counts of samples that are not answers."""

    groups: list[list[RecordedAnswer]] = field(default_factory=list)
    answers: int = 0
    """Number of recorded samples, including those left out."""
    left_out: Counter[str] = field(default_factory=Counter)
    """{reason: samples}."""


def read_answers(sources: Sequence[Path], *, truncated: bool = False) -> RecordedAnswers:
    """The answers in run directories, their ``rollouts`` folders, or single files of samples.

    An answer is one sampled turn after the prompt of a data row. Samples are left out and counted if they failed, are
    empty, have several turns, have a prompt that an environment extended, were cut off at their token budget, because
    as text they would seem complete, or are answers of the data that a run trained on.

    Args:
        truncated: also take answers that were cut off.

    Raises DataError naming file and line.
    """
    record = RecordedAnswers()
    for path in (file for source in sources for file in _files(source)):
        groups: dict[tuple[int, str], list[RecordedAnswer]] = {}
        location = str(path)
        try:
            for place, line in recorded(path):
                location = place
                members = groups.setdefault((line["group"], agent_of(line.get("turns") or ())), [])
                if line["sample"] is None:
                    continue
                record.answers += 1
                reason = _unusable(line, truncated)
                # In a file of `rlhf score` all answers are from the data.
                if path.suffix == SUFFIX and any(turn.get("is_demonstration") for turn in line["turns"]):
                    reason = "of the data, which the policy did not sample"
                if reason:
                    record.left_out[reason] += 1
                    continue
                prompt, urls = line["prompt"], tuple[str, ...]()
                if images := [b64decode(image["data"]) for image in line["turns"][0].get("images") or ()]:
                    if isinstance(prompt, list) and places(prompt) == len(images):
                        prompt = with_urls(prompt, images)
                    else:
                        urls = tuple(map(data_url, images))
                text = line["turns"][1]["text"]
                members.append(RecordedAnswer(line["sample"], prompt, text, line["reward"], urls))
        except CheckpointError as cause:
            raise DataError(f"{cause}. {RECORDED}") from cause
        except (KeyError, IndexError, TypeError) as cause:
            reason = f"it has no {cause}" if isinstance(cause, KeyError) else f"{type(cause).__name__}: {cause}"
            raise DataError(f"{location} is not a recorded sample: {reason}. {RECORDED}") from cause
        record.groups += groups.values()
    return record


def _unusable(line: Mapping[str, Any], truncated: bool) -> str:
    """Why a recorded sample is not an answer; empty if it is one."""
    turns = line["turns"]
    if line["status"] == "failed":
        return "that failed"
    if sum(turn["sampled"] for turn in turns) != 1 or len(turns) != 2:
        return "of several turns"
    if line["prompt"] is None:
        return "with more in their context than the row's prompt"
    if not turns[1]["text"].strip():
        return "without text"
    if not truncated and (line["status"] == "truncated" or turns[1]["finish"] == "length"):
        return "cut off"
    return ""


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    folder = source / "rollouts" if (source / "rollouts").is_dir() else source
    files = sorted(folder.glob("step-*.arrow"))
    if not source.exists():
        raise DataError(f"{source} does not exist")
    if not files:
        raise DataError(
            f"{source} holds no recorded samples. Allowed: a run directory with rollouts/ (checkpoint.save_rollouts), "
            "that folder, or a file of `rlhf eval --save`, `rlhf generate --save` or `rlhf score`."
        )
    return files
