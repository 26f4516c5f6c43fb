"""What a case computes on: micro-batches, losses and requests."""

from __future__ import annotations

from typing import Any

import torch
from rlhf.interfaces import Loss
from rlhf.ops.batch import Batch
from rlhf.ops.reduce import weigh
from rlhf.types import GenerationRequest, LossOutput, Reduce, Sampling


class Mean(Loss):
    """The plainest loss: the mean of an output over the trained tokens."""

    name = "mean"

    def __init__(self, output: str) -> None:
        super().__init__()
        self.output = output

    def outputs(self) -> tuple[str, ...]:
        return (self.output,)

    def columns(self) -> tuple[str, ...]:
        return ()

    def reduce(self) -> dict[str, Reduce]:
        return {"mean": Reduce("token_mean")}

    def __call__(self, x: Any) -> LossOutput:
        return LossOutput(terms={"mean": -x[self.output]})


def loss_of(case: dict[str, Any]) -> Loss:
    if case.get("loss") == "pairwise":
        from rlhf_plugin_reward_model import Pairwise

        return Pairwise(None)
    return Mean("values" if case.get("role") == "critic" else "logprobs")


def batch(case: dict[str, Any], vocabulary: int, seed: int) -> Batch:
    """A micro-batch of sequences of one length, loss on all that something predicts. They are distinct, alone or in
    pairs; or ``shared``, samples of one prompt, which is half of each, with loss on the answers: as many as compute
    these tokens."""
    length, shared, pairs = case["length"], case.get("shared", False), case.get("loss") == "pairwise"
    half = length // 2
    count = (case["tokens"] - half) // half if shared else case["tokens"] // length
    ids_N = torch.randint(3, vocabulary, (count * length,), generator=torch.Generator().manual_seed(seed))
    mask_N = torch.ones(count * length, dtype=torch.bool)
    mask_N[::length] = False
    if shared:
        ids_N.view(count, length)[:, :half] = ids_N[:half]
        mask_N.view(count, length)[:, :half] = False
    lens_B, number_B = torch.full((count,), length), torch.arange(count)
    unit_B, role_B = (number_B // 2, number_B % 2) if pairs else (number_B, torch.zeros_like(number_B))
    made = Batch(ids_N, lens_B, unit_B, role_B, {"loss_mask": mask_N})
    return weigh(made, loss_of(case).reduce())


def requests(case: dict[str, Any], vocabulary: int) -> list[GenerationRequest]:
    """8 samples of each prompt, prompt and answer half of the length each."""
    half, prompts = case["length"] // 2, case["samples"] // 8
    ids = torch.randint(3, vocabulary, (prompts, half), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = Sampling(max_new_tokens=half, ignore_eos=True)
    return [GenerationRequest(tuple(ids[i // 8]), i, sampling) for i in range(case["samples"])]
