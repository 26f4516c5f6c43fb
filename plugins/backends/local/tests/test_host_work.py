"""Operations that a micro-batch starts. On a GPU each one takes time of the host, whatever its size."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.rounded: Counter[tuple[int, ...]] = Counter()
        """{shape: tensors of it that were rounded to bf16}."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func._schema.name.removeprefix("aten::"), func(*args, **(kwargs or {}))
        self.counts[name] += 1
        if name == "_to_copy" and out.dtype == torch.bfloat16:
            self.rounded[tuple(out.shape)] += 1
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_of_a_step_share_the_rounded_weights(checkpointing, make_trainer, make_batch, nll):
    joint, single = (make_trainer(dtype="bf16", gradient_checkpointing=checkpointing) for _ in range(2))
    micros = [make_batch([9, 5], seed=seed, loss=nll) for seed in range(3)]
    weight = tuple(joint.module.model.layers[0].mlp.gate_proj.weight.shape)
    for _ in range(2):  # the second step sees the weights of the first one
        with Operations() as operations:
            joint.update(micros, nll, {}, {})
        for micro in micros:
            single.accumulate([micro], nll, {}, {})
        single.apply()
    per_micro = 4 if checkpointing else 2  # gate and up, twice where layers are computed again
    layers = len(joint.module.model.layers)
    assert operations.rounded[weight] == layers * (3 * per_micro if checkpointing else per_micro)
    for name, value in joint.parameters.items():
        assert torch.equal(value, single.parameters[name]), name


def test_log_probs_of_several_micro_batches_round_the_weights_once(make_trainer, make_batch):
    trainer = make_trainer(dtype="bf16")
    micros = [make_batch([9, 5], seed=seed) for seed in range(3)]
    weight = tuple(trainer.module.model.layers[0].mlp.gate_proj.weight.shape)
    with Operations() as operations:
        outs = trainer.forward(micros, ["logprobs"])
    assert operations.rounded[weight] == 2 * len(trainer.module.model.layers)
    for micro, out in zip(micros, outs, strict=True):
        assert torch.equal(out["logprobs"], trainer.forward([micro], ["logprobs"])[0]["logprobs"])


def test_fused_layers_fill_no_tensor_for_an_index_or_a_constant(make_trainer, make_batch, nll):
    trainer = make_trainer(kernels="own")
    micro = make_batch([9, 5], loss=nll)
    trainer.accumulate([micro], nll, {}, {})
    with Operations() as operations:
        trainer.accumulate([micro], nll, {}, {})
    assert not operations.counts["select_backward"]
    assert not operations.counts["new_full"]


def test_the_mode_of_every_module_is_set_and_restored(make_trainer, make_batch, nll):
    trainer, modes = make_trainer(), []
    trainer.module.model.register_forward_hook(
        lambda *_: modes.append({part.training for part in trainer.module.modules()})
    )
    trainer.accumulate([make_batch([5], loss=nll)], nll, {}, {})
    assert modes == [{True}]
    assert not any(part.training for part in trainer.module.modules())


def test_a_module_with_a_mode_of_its_own_keeps_it(make_trainer, make_batch, nll):
    class Still(torch.nn.Module):
        def train(self, mode=True):
            return super().train(False)

    trainer, modes = make_trainer(), []
    trainer.module.model.still = Still().train()
    trainer.module.model.register_forward_hook(
        lambda *_: modes.append((trainer.module.training, trainer.module.model.still.training))
    )
    trainer.accumulate([make_batch([5], loss=nll)], nll, {}, {})
    assert modes == [(True, False)]
