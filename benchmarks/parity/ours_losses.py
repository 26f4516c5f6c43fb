"""Losses of ours at every optimizer step, from metrics.jsonl of runs through the controller of `rlhf train`.

.venv/bin/python benchmarks/parity/ours_losses.py --work FOLDER --result FILE [--cases NAME ...]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from answering import answer
from cases import CASES, MAX_TOKENS, STEPS, TRAINING, Case, digest, rows
from rlhf.plugins import Plugins
from rlhf.types.examples import Example
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.offline import offline
from rlhf_runtime.output.metrics import read_metrics
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare


def run_file(case: Case, work: Path, folder: Path) -> RunFile:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows(case.form)))
    run: dict[str, Any] = {
        "run": {"output": str(folder / "run"), "steps": STEPS, "threads": 1},
        "policy": {"model": str(work / case.head), "dtype": "fp32"},
        "data": {
            "train": str(data),
            "batch_size": case.batch_size,
            "shuffle": False,
            "max_tokens": MAX_TOKENS,
        },
        "trainer": {**TRAINING, **case.training},
    }
    for section, options in case.ours.items():
        run[section] = {**run[section], **options} if section in run else options
    return RunFile.model_validate(run)


def rows_of(case: Case, examples: Sequence[Example]) -> list[list[tuple[list[int], int | None]]]:
    """The rows of one step as the algorithm gets them."""
    return [
        [(s.ids, None if case.head == "scalar" else s.loss_mask.index(True)) for s in sorted(e.sequences, key=_role)]
        for e in examples
    ]


def _role(sequence: Any) -> int:
    return int(sequence.role)


def losses(case: Case, work: Path) -> dict[str, Any]:
    batches = []
    with tempfile.TemporaryDirectory() as folder:
        run = build(prepare(run_file(case, work, Path(folder)), Plugins.discover()))
        assemble = run.algorithm.assemble

        def noted(examples: Any) -> Any:
            batches.append(rows_of(case, examples))
            return assemble(examples)

        run.algorithm.assemble = noted  # type: ignore[method-assign]
        try:
            offline(run)
        finally:
            run.close()
        lines = read_metrics(Path(folder) / "run/metrics.jsonl")
    return {"losses": [line["policy/loss"] for line in lines], "tokens": digest(batches)}


def main() -> None:
    torch.set_num_threads(1)
    answer(__doc__, CASES, losses, ("rlhf-core", "torch", "transformers"))


if __name__ == "__main__":
    main()
