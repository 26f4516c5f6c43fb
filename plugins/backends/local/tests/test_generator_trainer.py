"""Sampling from the torch trainer's module, whose layers are fused, and training on what was sampled."""

import pytest
import torch
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.fused import _FusedLayer
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer


@pytest.fixture(params=["fp32", "bf16", "stored in bf16"])
def trainer(request, model_path):
    role, dtype = RoleSpec("policy", trained=True), request.param[-4:]
    storage = "bf16" if request.param.startswith("stored") else "fp32"
    return TorchTrainer(None, ModelSpec(role, str(model_path), dtype=dtype, total_updates=4, storage=storage))


@pytest.fixture
def generator(trainer):
    sampler = TransformersGenerator(None, GeneratorSpec(tuple(trainer.eos_token_ids), trainer.tokenizer.decode))
    sampler.load(trainer, 0)
    return sampler


TEMPERATURES = (0.7, 1.0, 1.3)


def make_requests():
    prompts = [tuple(range(5, 9 + 4 * p)) for p in range(3)]
    return [GenerationRequest(ids, s, Sampling(30, TEMPERATURES[s % 3])) for ids in prompts for s in range(6)]


def batch_of(requests, turns):
    units = []
    for request, turn in zip(requests, turns, strict=True):
        n, m = len(request.ids), len(turn.ids)
        columns = {
            "loss_mask": [False] * n + [True] * m,
            "temperature": [1.0] * n + [turn.temperature] * m,
            "sampled": [0.0] * n + list(turn.logprobs),
        }
        units.append(UnitData([SequenceData([*request.ids, *turn.ids], columns)]))
    return pack(units)


def draw(generator):
    turns = dict(generator.generate(make_requests()))
    return [turns[i] for i in range(len(turns))]


def test_the_generators_logprobs_are_the_trainers(trainer, generator):
    turns = draw(generator)
    batch = batch_of(make_requests(), turns)
    logprobs = trainer.forward([batch], ["logprobs"])[0]["logprobs"]
    difference = (logprobs - batch.tok["sampled"])[batch.tok["loss_mask"]].abs()
    assert any(isinstance(m.forward, _FusedLayer) for m in trainer.module.modules())
    if trainer.precision.bf16:
        assert difference.mean() < 0.01
    else:
        assert difference.max() < 1e-5


def test_sampling_and_training_alternate(trainer, generator, nll):
    first = draw(generator)
    assert draw(generator) == first
    batch = weigh(batch_of(make_requests(), first), nll.reduce())
    old_logprobs = trainer.forward([batch], ["logprobs"])[0]["logprobs"]
    trainer.update([batch], nll, {}, {})
    generator.load(trainer, 1)
    after = draw(generator)
    assert {t.versions for t in after} == {((0, 1),)}
    new = batch_of(make_requests(), after)
    logprobs = trainer.forward([new], ["logprobs"])[0]["logprobs"]
    difference = (logprobs - new.tok["sampled"])[new.tok["loss_mask"]].abs()
    assert difference.max() < (0.1 if trainer.precision.bf16 else 1e-5)
    assert not torch.equal(trainer.forward([batch], ["logprobs"])[0]["logprobs"], old_logprobs)
