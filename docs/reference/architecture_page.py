"""The words of ``architectures.md``: a line for each row, and the reasons of what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("torch", "fsdp", "deepspeed", "transformers", "vllm")
"""The trainers and samplers that have a column."""
LAYOUTS = {"shared": "packed", "packed": "packed, prefixes apart", "alone": "by length"}
"""``LoadedModel.layout``, in a word."""


def heading(columns: Sequence[str]) -> str:
    return "\n".join([f"| type | computed | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"])


def line(row: Mapping[str, Any], columns: Sequence[str] = COLUMNS, numbers: Mapping[str, int] | None = None) -> str:
    """The line of a row.

    Args:
        numbers: {reason: its number}; None: reasons are not numbered.
    """
    cells = []
    for column in columns:
        verdict, cause = verdict_of(row, column)
        cells.append(f"{verdict} ({numbers[cause]})" if numbers and cause in numbers else verdict)
    return f"| `{row['name']}` | {LAYOUTS.get(row.get('layout', ''), '')} | {' | '.join(cells)} |"


def verdict_of(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    """``yes``, ``refused``, ``WRONG``, ``error`` or ``not run``, and the reason. The comparison with transformers alone
    is one of the trainer ``torch``: ``compared`` where it is right and no run was made."""
    run = row.get("runs", {}).get(column, {"verdict": "not run"})
    if column == "torch" and (run["verdict"] == "not run" or row["verdict"] in ("WRONG", "raw")):
        run = row
    words = {"raw": "error", "right": "compared", "not built": "not run"}
    return words.get(run["verdict"], run["verdict"]), reason(run)


def reason(run: Mapping[str, Any]) -> str:
    """The error of a run without its class, the model's class and its folder, so that equal reasons are equal."""
    if "failed" not in run:
        return "log-probs or gradients differ from those of transformers alone" if run["verdict"] == "WRONG" else ""
    words = run["failed"] if run["verdict"] == "raw" else re.sub(r"^\w+Error: ", "", run["failed"])
    words = re.sub(r"'?/\S*/model'?", "PATH", words)
    words = re.sub(r"\b[A-Z]\w*(?:For\w+|LMHead\w*|Model)\b( \(PATH[^)]*\))?", "the model", words)
    return words.replace("|", "\\|")


def reasons(row: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> list[str]:
    """A line for each reason of a row, with what it is the reason of."""
    lines = [f"not built: {reason(row)}"] if row["verdict"] == "not built" else []
    out: dict[str, list[str]] = {}
    for column in columns:
        if cause := verdict_of(row, column)[1]:
            out.setdefault(cause, []).append(column)
    return lines + [f"{', '.join(names)}: {cause}" for cause, names in out.items()]
