"""Router replay: recorded choices of experts are used in every forward pass, and the gap of another routing closes."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import CapabilityError, ModelError, TrainingError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.ops.experts import EXPERTS, UNKNOWN, choices_of
from rlhf.ops.trajectories import assemble
from rlhf.types import GenerationRequest, Group, RoleSpec, Row, Sampling, Trajectory, Turn
from rlhf_modeling.experts import named_routers
from rlhf_modeling.router_replay import expert_layers
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing.models import model_path
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from tests.support.tiny_architectures import tiny_config

MODELS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {"head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
}
LENS = (9, 12, 5)


def trainer_of(name="qwen3_moe", checkpointing=False, **options):
    spec = ModelSpec(RoleSpec("policy", trained=True), str(model_path(name, **MODELS[name])), "fp32", checkpointing)
    return TorchTrainer(TorchTrainerConfig(**{"device": "cpu", "router_replay": True, "lr": 1e-2, **options}), spec)


def replace_choices(batch, trainer, share=0.7):
    """The batch with choices drawn at random, ``share`` of the tokens have some."""
    layers, draw = trainer.loaded_model.routers.layers, torch.Generator().manual_seed(1)
    scores = torch.rand(batch.tokens, len(layers.layers), layers.experts, generator=draw)
    experts_NLK = scores.argsort(-1)[..., : layers.chosen].to(torch.int16)
    experts_NLK[torch.rand(batch.tokens, generator=draw) > share] = UNKNOWN
    return batch.with_column("tok", EXPERTS, experts_NLK, over=None)


def router_outputs(trainer, run):
    """(weights, choices) [N, L, K] that the routers give to the experts in ``run``."""
    outputs = []
    routers = [router for _, router in named_routers(trainer.module)]
    handles = [r.register_forward_hook(lambda module, inputs, out: outputs.append(out[1:])) for r in routers]
    run()
    for handle in handles:
        handle.remove()
    return [torch.stack(parts[: len(routers)], 1) for parts in zip(*outputs, strict=True)]


def logprobs(trainer, batch):
    return trainer.forward([batch], ["logprobs"])[0]["logprobs"]


@pytest.mark.parametrize("name", MODELS)
def test_changed_choices_are_replayed_bit_for_bit_with_the_routers_own_weights(name, make_batch):
    trainer, plain = trainer_of(name, shared_prefixes=False), make_batch((9, 9, 9))
    batch = replace_choices(plain, trainer)
    (own_weights, plain_choices), (weights, choices) = (
        router_outputs(trainer, lambda b=b: logprobs(trainer, b)) for b in (plain, batch)
    )
    want = batch.tok[EXPERTS].long()
    known_N = want[:, 0, 0] != UNKNOWN
    assert torch.equal(choices[known_N], want[known_N])
    first = choices[~known_N][:, 0]
    assert torch.equal(first, plain_choices[~known_N][:, 0]), (
        "before another token is mixed in, a token without a record is its own"
    )
    assert torch.equal(weights[~known_N][:, 0], own_weights[~known_N][:, 0])
    assert weights.shape == own_weights.shape
    assert (logprobs(trainer, batch) - logprobs(trainer, plain)).abs().max() > 0.01


def test_without_records_nothing_changes(make_batch, nll):
    batch = make_batch(LENS, loss=nll)
    unknown = replace_choices(batch, trainer_of(), share=-1.0)
    plain_trainer, on = trainer_of(router_replay=False), trainer_of()
    numbers = []
    for trainer, b in ((plain_trainer, batch), (plain_trainer, replace_choices(batch, on)), (on, batch), (on, unknown)):
        numbers.append((logprobs(trainer, b), trainer.accumulate([b], nll, {}, {}), trainer.gradients()))
        trainer.zero_grad()
    for other in numbers[1:]:
        assert torch.equal(other[0], numbers[0][0])
        assert other[1] == numbers[0][1]
        assert all(torch.equal(other[2][k], v) for k, v in numbers[0][2].items())


def test_layers_that_are_computed_again_use_the_records(make_batch, nll):
    gradients = []
    for checkpointing in (False, True):
        trainer = trainer_of(checkpointing=checkpointing)
        batch = replace_choices(make_batch(LENS, loss=nll), trainer)
        _, choices = router_outputs(trainer, lambda t=trainer, b=batch: t.accumulate([b], nll, {}, {}))
        assert torch.equal(
            choices[batch.tok[EXPERTS][:, 0, 0] >= 0], batch.tok[EXPERTS][batch.tok[EXPERTS][:, 0, 0] >= 0].long()
        )
        gradients.append(trainer.gradients())
    plain = trainer_of(router_replay=False)
    plain.accumulate([batch], nll, {}, {})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-7)
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(plain.gradients()[gate], gradients[0][gate], atol=1e-4)


def prompts_of(count=6):
    ids = tuple(range(5, 17))
    return [GenerationRequest(ids, seed, Sampling(10)) for seed in range(count)]


def batch_of(requests, turns):
    row = Row({"prompt": ""}, "data", 0)
    samples = [
        Trajectory(row, [Turn(r.ids, False), turn], (0, n), reward=0.0)
        for n, (r, turn) in enumerate(zip(requests, turns, strict=True))
    ]
    return assemble([Group(row, 0, samples)])


def sampled(trainer, **options):
    generator = TransformersGenerator(
        TransformersGenerator.Config(**options), GeneratorSpec((), str, experts=trainer.loaded_model.routers.layers)
    )
    generator.load(trainer, 0)
    turns = dict(generator.generate(prompts_of()))
    return [turns[n] for n in range(len(turns))]


class LowestExperts(TorchFunctionMode):
    """An engine whose routers choose other experts than the trainer's."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}), **({"largest": False} if func is torch.topk else {}))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shared", [True, False])
def test_the_gap_of_an_engine_with_another_routing_closes(name, shared):
    trainer = trainer_of(name, shared_prefixes=shared)
    with LowestExperts():
        turns = sampled(trainer, max_batch=4)
    batch = batch_of(prompts_of(), turns)
    unknown_N = batch.tok[EXPERTS][:, 0, 0] == UNKNOWN
    last_B = batch.starts_B + batch.lens_B - 1
    assert unknown_N.nonzero()[:, 0].tolist() == last_B.tolist(), "all but the last token of each answer"
    mask_N, want = batch.tok["loss_mask"], batch.tok["gen_logprobs"]
    plain = batch.select_columns([c for c in batch.tok if c != EXPERTS])
    assert (logprobs(trainer, plain) - want)[mask_N].abs().mean() > 0.05
    assert (logprobs(trainer, batch) - want)[mask_N].abs().max() < 1e-5


def test_records_of_the_same_routing_change_nothing():
    trainer = trainer_of()
    turns = sampled(trainer)
    assert turns == sampled(trainer)
    layers = trainer.loaded_model.routers.layers
    choices = choices_of(turns[0].experts)
    assert choices.shape == (12 + 10 - 1, len(layers.layers), layers.chosen)
    batch = batch_of(prompts_of(), turns)
    plain = batch.select_columns([c for c in batch.tok if c != EXPERTS])
    assert (logprobs(trainer, batch) - logprobs(trainer, plain)).abs().max() < 1e-6
    generator = TransformersGenerator(None, GeneratorSpec((), str))
    generator.load(trainer, 0)
    for number, turn in generator.generate(prompts_of()):
        assert turn.experts is None
        assert (turn.ids, turn.logprobs) == (turns[number].ids, turns[number].logprobs)


def test_a_prefix_with_other_experts_is_not_shared(make_batch):
    trainer = trainer_of()
    row = make_batch([14])
    two = batch_of([GenerationRequest(row.ids_N.tolist()[:13], 0, Sampling(1))] * 2, [Turn([5], True, [0.0])] * 2)
    experts_NLK = replace_choices(two, trainer, share=2.0).tok[EXPERTS]
    batch = two.with_column("tok", EXPERTS, experts_NLK, over=None)
    unshared = trainer_of(shared_prefixes=False)
    assert trainer.facts().shares_prefixes
    assert (logprobs(trainer, batch) - logprobs(unshared, batch)).abs().max() < 1e-6


def test_routers_of_other_classes_are_tried():
    for name in ("deepseek_v2", "ernie4_5_moe", "minimax", "olmoe", "qwen2_moe", "qwen3_next"):
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(tiny_config(name))
        layers = expert_layers(module)
        assert (layers.layers[-1], layers.experts, layers.chosen) == (1, 4, 2)


def test_models_whose_experts_cannot_be_replayed_are_refused():
    config, role = TorchTrainerConfig(router_replay=True), RoleSpec("policy", trained=True)
    dense = ModelSpec(role, str(model_path()), "fp32")
    with pytest.raises(CapabilityError, match="router_replay: Qwen3ForCausalLM has no experts"):
        TorchTrainer.check(config, dense, "cpu")
    sizes = {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    sizes |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "q_lora_rank": 8, "kv_lora_rank": 8}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    other = ModelSpec(role, str(model_path("deepseek_v3", **sizes)), "fp32")
    with pytest.raises(CapabilityError, match=r"DeepseekV3TopkRouter .* is not a router whose choices can be replaced"):
        TorchTrainer.check(config, other, "cpu")
    assert TorchTrainer.experts(config, ModelSpec(RoleSpec("reference"), str(model_path()), "fp32")) is None


def test_records_that_do_not_fit_the_model_are_refused(make_batch):
    trainer = trainer_of()
    batch = replace_choices(make_batch(LENS), trainer_of("qwen3_moe"))
    wider = batch.tok[EXPERTS].repeat(1, 1, 2)
    with pytest.raises(
        TrainingError, match=r"the recorded experts have the shape .*, but the router chooses experts of the shape"
    ):
        logprobs(trainer, batch.with_column("tok", EXPERTS, wider, over=None))
    generator = TransformersGenerator(None, GeneratorSpec((), str, experts=trainer.loaded_model.routers.layers))
    with pytest.raises(ModelError, match=r"Set trainer\.router_replay"):
        generator.load(trainer_of(router_replay=False), 0)
