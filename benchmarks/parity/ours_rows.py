"""Rows as ours tokenises them: ``rlhf_runtime.data``, and the mismatched answers of KTO."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rlhf.errors import DataError
from rlhf.types.examples import Example
from rlhf_plugin_kto.twins import Labelled, twins
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.row_rules import RowVerdict
from row_cases import TEMPLATES, RowCase


def encoded(case: RowCase, work: Path) -> list[dict[str, Any]]:
    """Every row of a case: its sequences, or why it is refused."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(work / case.tokenizer))
    tokenizer.chat_template = TEMPLATES[case.template if case.ours_template is None else case.ours_template]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
        section = DataSection(
            train=(SourceSection(path=str(file)),), shuffle=False, max_tokens=case.max_tokens, **case.ours
        )
        try:
            data = TrainData(section, tokenizer, case.form, seed=0)  # type: ignore[arg-type]
        except DataError as error:
            return [{"refused": "columns", "why": str(error)} for _ in case.rows]
        (source,) = data.sources["train"]
        verdicts = [data.judge(source[number]) for number in range(len(case.rows))]
    rows = [_row(case, verdict) for verdict in verdicts]
    if case.form == "labels":
        _with_twins(rows, [v.example for v in verdicts if not v.kind and v.example is not None])
    return rows


def _row(case: RowCase, verdict: RowVerdict) -> dict[str, Any]:
    if verdict.kind or verdict.example is None:
        return {"refused": verdict.kind, "why": verdict.text}
    by_role = sorted(verdict.example.sequences, key=lambda s: s.role)
    masks = ["" if case.trainer == "reward" else "0" + "".join(str(int(on)) for on in s.loss_mask[1:]) for s in by_role]
    sequences = [[list(s.ids), mask] for s, mask in zip(by_role, masks, strict=True)]
    return {"sequences": sequences, **verdict.example.values}


def _with_twins(rows: list[dict[str, Any]], examples: list[Example]) -> None:
    """Add to each row the sequence of its prompt with KTO's mismatched answer."""
    labelled = [Labelled.of(e.sequences[0], e.values["label"], (0, e.row.source, e.row.index)) for e in examples]
    for example, sample, other in zip(examples, labelled, twins(labelled), strict=True):
        twin = labelled[other] if other is not None else None
        if twin is not None:
            mask = "0" * len(sample.prompt) + "".join(str(int(on)) for on in twin.mask)
            rows[example.row.index]["sequences"].append([[*sample.prompt, *twin.answer], mask])
