"""Shared prefixes on and off: forward and backward of the same batches, in alternation, in one process.

Needs no peer: `python benchmarks/ours_prefixes.py`. Each arm gets the micro-batches that the controller would give it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model import CHARS, make_model
from rlhf.interfaces import Loss, ModelSpec
from rlhf.ops.batch import Batch
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import LossOutput, Reduce, RoleSpec
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_runtime.models.dispatch import plan, unit_prefixes
from settings import LONGEST, PROMPTS, ROWS, SAMPLES, SHORTEST, THREADS

SHAPES = {  # name: (prompts, samples of each, tokens of a prompt, tokens of an answer)
    f"{PROMPTS} x {SAMPLES}, 6 + 64 tokens": (PROMPTS, SAMPLES, 6, [64]),
    f"{PROMPTS} x {SAMPLES}, 6 + 1 to 64": (PROMPTS, SAMPLES, 6, list(range(1, 65, 7))),
    f"{PROMPTS} x {SAMPLES}, 200 + 64": (PROMPTS, SAMPLES, 200, [64]),
    f"2 x {SAMPLES}, 500 + 500": (2, SAMPLES, 500, [500]),
    f"{PROMPTS} pairs, 200 + 64": (PROMPTS, 2, 200, [64]),
    f"{PROMPTS * SAMPLES} x 1, 70": (PROMPTS * SAMPLES, 1, 0, [70]),
    f"{ROWS} x 1, {SHORTEST} to {LONGEST}": (ROWS, 1, 0, list(range(SHORTEST, LONGEST + 1, 12))),
}


class Nll(Loss):
    name = "nll"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def reduce(self) -> dict[str, Reduce]:
        return {"nll": Reduce("token_mean")}

    def __call__(self, x: dict[str, torch.Tensor]) -> LossOutput:
        return LossOutput({"nll": -x["logprobs"]})


def make_batch(prompts: int, samples: int, prompt_tokens: int, answer_tokens: list[int]) -> Batch:
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 3 + len(CHARS)) for _ in range(count)]

    units = []
    for _ in range(prompts):
        prompt = ids(prompt_tokens)
        for _ in range(samples):
            row = prompt + ids(answer_tokens[len(units) % len(answer_tokens)])
            units.append(UnitData([SequenceData(row, {"loss_mask": [i >= prompt_tokens for i in range(len(row))]})]))
    return weigh(pack(units), Nll().reduce())


def arm(model: Path, precision: str, share: bool, batch: Batch) -> tuple[Callable[[], None], list[int]]:
    """(one update's forward and backward, tokens that entered the embedding in each forward pass)."""
    config = TorchTrainerConfig(lr=0.0, device="cpu", shared_prefixes=share)
    trainer = TorchTrainer(config, ModelSpec(RoleSpec("policy", "lm", True), str(model), precision))
    entered: list[int] = []
    trainer.module.get_input_embeddings().register_forward_hook(lambda _, ids, y: entered.append(ids[0].numel()))

    def run() -> None:
        if share:
            units = unit_prefixes(batch)
            [micros] = plan(units.tokens, 1, trainer.facts().token_budget, units.order, units.shared)
        else:
            [micros] = plan(batch.tokens_per_unit(), 1, trainer.facts().token_budget)
        trainer.accumulate([batch.select(units) for units in micros], Nll(), {}, {})
        trainer.zero_grad()

    return run, entered


def measure(model: Path, precision: str, name: str, repeats: int) -> dict[str, object]:
    batch = make_batch(*SHAPES[name])
    arms = {share: arm(model, precision, share, batch) for share in (False, True)}
    wall: dict[bool, list[float]] = {share: [] for share in arms}
    processor: dict[bool, list[float]] = {share: [] for share in arms}
    tokens = {}
    for repeat in range(repeats + 1):
        for share, (run, entered) in arms.items():
            entered.clear()
            start, busy = time.perf_counter(), time.process_time()
            run()
            tokens[share] = sum(entered)
            if repeat:  # the first is a warm-up
                wall[share].append(time.perf_counter() - start)
                processor[share].append(time.process_time() - busy)
    return {
        "shape": name,
        "precision": precision,
        "tokens": tokens[False],
        "computed": tokens[True],
        "seconds_off": statistics.median(wall[False]),
        "seconds_on": statistics.median(wall[True]),
        "ratio": statistics.median(wall[False]) / statistics.median(wall[True]),
        "ratio_of_least": min(wall[False]) / min(wall[True]),
        "ratio_of_least_processor_time": min(processor[False]) / min(processor[True]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each arm")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--result", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows = []
    print("| samples | | tokens | computed | off, s | on, s | off / on | of the least | of the least processor time |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        for precision in arguments.precisions:
            for name in arguments.shapes:
                r = measure(Path(folder) / "model", precision, name, arguments.repeats)
                rows.append(r)
                print(
                    f"| {name} | {precision} | {r['tokens']} | {r['computed']} | {r['seconds_off']:.2f} "
                    f"| {r['seconds_on']:.2f} | **{r['ratio']:.2f}** | {r['ratio_of_least']:.2f} "
                    f"| {r['ratio_of_least_processor_time']:.2f} |",
                    flush=True,
                )
    if arguments.result:
        arguments.result.write_text(json.dumps({"threads": THREADS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
