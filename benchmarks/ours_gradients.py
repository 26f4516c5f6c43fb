"""Gradients of ours on the batches of gate.json, through the unchanged algorithms grpo and sft, in fp32."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from ours_train import run_file
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf.types.examples import Example, Sequence
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare
from safetensors.torch import save_file
from settings import THREADS


def groups(rows: list[dict]) -> list[Group]:
    result = []
    for number, record in enumerate(rows):
        row, trajectories = Row({}, "gate", number), []
        for sample, (ids, reward) in enumerate(zip(record["answers"], record["rewards"], strict=True)):
            turns = [Turn(record["prompt"], sampled=False), Turn(ids, sampled=True, finish="stop")]
            trajectories.append(Trajectory(row, turns, (number, sample), reward=reward, score=reward))
        result.append(Group(row, number, trajectories))
    return result


def demonstrations(rows: list[dict]) -> list[Example]:
    return [
        Example(
            Row({}, "gate", number),
            [
                Sequence(
                    record["prompt"] + record["answer"],
                    [False] * len(record["prompt"]) + [True] * len(record["answer"]),
                )
            ],
        )
        for number, record in enumerate(rows)
    ]


def save(work: Path, workload: str) -> None:
    """``grpo`` or ``sft``: gradients on the batch of gate.json, in ``ours-WORKLOAD.safetensors``."""
    gate = json.loads((work / "gate.json").read_text())
    examples = groups(gate["grpo"]) if workload == "grpo" else demonstrations(gate["sft"])
    with tempfile.TemporaryDirectory() as folder:
        config = run_file("grpo-forced" if workload == "grpo" else "sft", "fp32", work, 1, f"{folder}/run", 1)
        prepared = prepare(config, Plugins.discover())
        run = build(prepared)
        try:
            batch, _ = run.algorithm.assemble(examples)
            batch, _ = run.algorithm.credit(batch)
            (update,) = run.algorithm.updates(0, batch)
            loss = run.algorithm.parts[update.loss]
            batch = weigh(loss.prepare(batch), loss.reduce())
            gradients = run.roles["policy"].gradients(batch, loss, update)
        finally:
            run.status = "failed"  # no step was made: nothing to export
            run.close()
    save_file({k: v.contiguous() for k, v in gradients.items()}, str(work / f"ours-{workload}.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    work = parser.parse_args().work
    torch.set_num_threads(THREADS)
    for workload in ("grpo", "sft"):
        save(work, workload)


if __name__ == "__main__":
    main()
