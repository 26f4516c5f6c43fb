"""The share of an update that the correction of sampled tokens takes, in processor time of one thread.

    python benchmarks/correction.py [--repeats 7]

Updates of 128 samples of 64 tokens alternate with and without it: forward, backward and optimizer. They vary by more
than the correction takes. So the loss alone, on outputs that are there already, is timed with and without it too: the
difference is the correction, with its metrics.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from model import make_model
from ours_prefixes import SHAPES, make_batch
from rlhf.interfaces import ModelSpec
from rlhf.ops.loss_value import evaluate
from rlhf.ops.reduce import weigh
from rlhf.types import RoleSpec
from rlhf_algorithms.correction import PRESETS
from rlhf_algorithms.policy_losses import PPOLoss
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_runtime.models.dispatch import plan

LOSSES = 50
"""Evaluations of the loss in one repeat."""
COSTLIEST = "kpop"
"""Two divergences for each token. It is the one that whole updates are taken with."""


def processor_seconds(call: Callable[[PPOLoss], object], loss: PPOLoss) -> float:
    start = time.process_time()
    call(loss)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="timed repeats of each arm")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    losses = {"none": PPOLoss()} | {name: PPOLoss(PPOLoss.Config(correction={"preset": name})) for name in PRESETS}
    batch = make_batch(*next(iter(SHAPES.values())))
    logprobs_N = -torch.rand(batch.tokens)
    for column, scale in (("old_logprobs", 0.0), ("gen_logprobs", 0.01), ("advantages", 1.0)):
        batch = batch.with_column("tok", column, logprobs_N + scale * torch.randn(batch.tokens))
    batch = weigh(batch, losses["none"].reduce())
    loss_seconds: dict[str, list[float]] = {name: [] for name in losses}
    updates: dict[str, list[float]] = {"none": [], COSTLIEST: []}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        config = TorchTrainerConfig(lr=0.0, device="cpu")
        trainer = TorchTrainer(config, ModelSpec(RoleSpec("policy", "lm", True), folder, "fp32", total_updates=1))
        [parts] = plan(batch.tokens_per_unit(), 1, trainer.facts().token_budget)
        micros = [batch.select(units) for units in parts]
        outputs = {"logprobs": logprobs_N[batch.tok["loss_mask"]].requires_grad_()}

        def update(loss: PPOLoss) -> None:
            trainer.accumulate(micros, loss, {}, {})
            trainer.apply()

        def evaluations(loss: PPOLoss) -> None:
            for _ in range(LOSSES):
                evaluate(loss, batch, outputs, {}, {})[0].backward()

        for repeat in range(repeats + 1):
            for call, seconds in ((update, updates), (evaluations, loss_seconds)):
                for name in seconds:
                    duration = processor_seconds(call, losses[name])
                    if repeat:  # the first is a warm-up
                        seconds[name].append(duration)
    update_seconds, bare = (statistics.median(seconds["none"]) for seconds in (updates, loss_seconds))
    ratios = [correction / none for none, correction in zip(*updates.values(), strict=True)]
    print(
        f"{int(batch.tok['loss_mask'].sum())} tokens, {repeats} repeats. An update takes {update_seconds:.2f} s, with "
        f"{COSTLIEST} {statistics.median(ratios):.3f} times as long ({min(ratios):.3f} to {max(ratios):.3f}).\n"
    )
    print("| correction | the loss alone, ms | above none, ms | share of an update |\n|---|---|---|---|")
    for name, seconds in loss_seconds.items():
        duration = statistics.median(seconds)
        cost = (duration - bare) / LOSSES
        print(f"| {name} | {1e3 * duration / LOSSES:.2f} | {1e3 * cost:.2f} | {cost / update_seconds:.3%} |")


if __name__ == "__main__":
    main()
