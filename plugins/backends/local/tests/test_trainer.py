"""The trainer: gradients, steps, skipped steps, frozen roles, dropout, checkpointing, EMA, coverage."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from rlhf.errors import CapabilityError, ConfigError, TrainingError
from rlhf.interfaces import Loss, ModelSpec
from rlhf.types import LossOutput, Reduce, RoleSpec
from rlhf_modeling.host_inputs import HostInputs
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.tiny import tiny_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

LENS = [6, 15, 9, 30, 4]


def close(a: dict, b: dict, tolerance: float = 1e-5) -> None:
    flat = [torch.cat([d[n].flatten() for n in a]) for d in (a, b)]
    assert (flat[0] - flat[1]).norm() <= tolerance * flat[1].norm()


def test_gradients_equal_a_plain_loop(model_path, make_trainer, make_batch, nll):
    batch = make_batch(LENS, loss=nll)
    trainer = make_trainer()
    sums = trainer.accumulate([batch], nll, {}, {})
    model = AutoModelForCausalLM.from_pretrained(model_path)
    total, count = torch.zeros(()), int(batch.tok["loss_mask"].sum())
    for b in range(batch.sequences):
        ids = batch.select([b]).ids_N
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        total = total - logp[:-1].gather(1, ids[1:, None])[1:].sum() / count  # the first two tokens are the prompt
    total.backward()
    assert sums["loss"][0] == pytest.approx(total.item(), rel=1e-6)
    close(trainer.gradients(), {n: p.grad for n, p in model.named_parameters()})


def test_gradients_add_over_micro_batches(make_trainer, make_batch, nll):
    batch, trainer = make_batch(LENS, loss=nll), make_trainer()
    trainer.accumulate([batch], nll, {}, {})
    gradients = trainer.gradients()
    trainer.zero_grad()
    for units in ([1], [0, 4], [3, 2]):
        trainer.accumulate([batch.select(units)], nll, {}, {})
    close(trainer.gradients(), gradients)


def test_gradient_checkpointing_and_logit_chunks_change_nothing(make_trainer, make_batch, nll):
    batch = make_batch(LENS, loss=nll)
    gradients = []
    for options in ({}, {"gradient_checkpointing": True}, {"logits_chunk": 500}):
        trainer = make_trainer(**options)
        trainer.accumulate([batch.select([0, 1]), batch.select([2, 3, 4])], nll, {}, {})
        gradients.append(trainer.gradients())
        assert trainer.module.training is False
    assert trainer.module.model.gradient_checkpointing is False
    close(gradients[1], gradients[0], 1e-6)
    close(gradients[2], gradients[0], 1e-6)


def test_gradient_checkpointing_computes_layers_again(make_trainer, make_batch, nll):
    calls = {}
    for on in (False, True):
        trainer, n = make_trainer(gradient_checkpointing=on), []
        trainer.module.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_, n=n: n.append(1))
        trainer.accumulate([make_batch(LENS, loss=nll)], nll, {}, {})
        calls[on] = len(n)
    assert calls == {False: 1, True: 2}


@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"lora": {"rank": 4}}, {"logits_chunk": 500}], ids=str)
def test_offloaded_activations_move_every_layer_and_change_no_bit(make_trainer, make_batch, nll, options):
    """Over two micro-batches, one of them after a graph without a backward pass. On the CPU nothing is pinned."""
    batch, gradients = make_batch(LENS, loss=nll), []
    for on in (False, True):
        trainer = make_trainer(gradient_checkpointing=True, offload_activations=on, **options)
        trainer.module.train()
        unused = trainer.packed(batch.select([1]), [trainer._head("logprobs")])
        trainer.accumulate([batch.select([0, 1]), batch.select([2, 3, 4])], nll, {}, {})
        gradients.append(trainer.gradients())
        del unused
    assert trainer.host_inputs.count == 3 * len(trainer.module.model.layers)
    assert all(torch.equal(value, gradients[0][name]) for name, value in gradients[1].items())


def test_offloaded_activations_without_gradient_checkpointing_are_refused(make_trainer):
    with pytest.raises(ConfigError, match=r"role 'policy' has gradient_checkpointing = false"):
        make_trainer(offload_activations=True)
    assert make_trainer(offload_activations=True, trained=False).host_inputs is None


def test_offloaded_activations_are_fetched_one_layer_ahead(monkeypatch):
    inputs, order = HostInputs(torch.device("cpu")), []
    fetch = inputs._fetch
    monkeypatch.setattr(inputs, "_fetch", lambda packed: (order.append(f"fetch {packed.host[0]:g}"), fetch(packed)))
    layer = inputs.around(partial(checkpoint, use_reentrant=False))
    x = torch.ones(1, requires_grad=True)
    for _ in range(3):

        def double(x):
            order.append(f"layer {x[0]:g}")
            return 2 * x * x.detach()

        x = layer(double, x + 1)
    order.clear()
    x.sum().backward()
    assert order == ["fetch 163", "fetch 9", "layer 163", "fetch 2", "layer 9", "layer 2"]


@pytest.mark.parametrize(("logits_chunk", "maximum"), [(500, 5), (198, 2), (197, 1), (50, 1), (10**6, 54)])
def test_no_more_logits_than_the_option_allows_exist_at_once(make_trainer, make_batch, nll, logits_chunk, maximum):
    """The vocabulary has 99 tokens; 54 tokens are trained. Also in passes without a gradient."""
    trainer, batch, rows = make_trainer(logits_chunk=logits_chunk), make_batch(LENS, loss=nll), []
    trainer.loaded_model.head.register_forward_hook(lambda _, x, y: rows.append(y.shape[0]))
    trainer.accumulate([batch], nll, {}, {})
    trained = max(rows)
    rows.clear()
    trainer.forward([batch], ["logprobs"])
    assert (trained, max(rows)) == (maximum, maximum)


def test_training_lowers_the_loss_and_reports_the_step(make_trainer, make_batch, nll):
    batch, trainer = make_batch(LENS, loss=nll), make_trainer(lr=3e-3, schedule="linear", total_updates=4)
    losses, rates = [], []
    for _ in range(4):
        sums, result = trainer.update([batch], nll, {}, {})
        losses.append(sums["loss"][0])
        rates.append(result.lr)
        assert result.grad_norm > 0
        assert not result.skipped
    assert losses == sorted(losses, reverse=True)
    assert rates == pytest.approx([3e-3, 2.25e-3, 1.5e-3, 0.75e-3])


def test_the_step_is_adamw_with_the_options_that_are_given(make_trainer, make_batch, nll):
    """Loshchilov & Hutter 2019, algorithm 2, two steps in float64; vectors do not decay."""
    lr, (b1, b2), eps, decay = 0.01, (0.5, 0.6), 0.1, 3.0
    options = {"lr": lr, "betas": (b1, b2), "eps": eps, "weight_decay": decay, "max_grad_norm": None}
    batch, trainer = make_batch(LENS, loss=nll), make_trainer(**options)
    m, v = dict.fromkeys(trainer.parameters, 0.0), dict.fromkeys(trainer.parameters, 0.0)
    for t in (1, 2):
        trainer.accumulate([batch], nll, {}, {})
        old_weights = {n: p.detach().double() for n, p in trainer.parameters.items()}
        gradient = {n: g.double() for n, g in trainer.gradients().items()}
        trainer.apply()
        for n, g in gradient.items():
            m[n], v[n] = b1 * m[n] + (1 - b1) * g, b2 * v[n] + (1 - b2) * g * g
            remainder = old_weights[n] * (1 - lr * decay * (old_weights[n].ndim > 1))
            expected = remainder - lr * (m[n] / (1 - b1**t)) / ((v[n] / (1 - b2**t)).sqrt() + eps)
            torch.testing.assert_close(trainer.parameters[n].detach().double(), expected, rtol=1e-5, atol=1e-7)


def test_clipping_bounds_the_step_and_reports_the_norm_before(make_trainer, make_batch, nll):
    from rlhf_modeling.optimizer import clip

    trainer = make_trainer(max_grad_norm=0.5)
    trainer.accumulate([make_batch(LENS, loss=nll)], nll, {}, {})
    old_norm = torch.cat([g.flatten() for g in trainer.gradients().values()]).norm()
    norm = clip(trainer.parameters, 0.5)
    new_norm = torch.cat([g.flatten() for g in trainer.gradients().values()]).norm()
    assert norm == pytest.approx(float(old_norm), rel=1e-5)
    assert float(old_norm) > 0.5
    assert float(new_norm) == pytest.approx(0.5, rel=1e-4)
    for limit in (10.0, None):
        assert clip(trainer.parameters, limit) == pytest.approx(float(new_norm)), "smaller gradients stay as they are"


def test_a_non_finite_loss_skips_the_step(make_trainer, make_batch, nll):
    class Broken(type(nll)):
        def __call__(self, x):
            return LossOutput({"nll": -x["logprobs"] * float("nan")})

    batch, trainer = make_batch(LENS, loss=nll), make_trainer(ema_decay=0.5)
    old_weights = {n: t.clone() for n, t in trainer.weights()}
    trainer.accumulate([batch.select([0])], nll, {}, {})  # the correct micro-batch before it is not applied either
    trainer.accumulate([batch.select([1, 2])], Broken(), {}, {})
    result = trainer.apply()
    assert result.skipped == "non-finite loss (nan) of 'nll'"
    assert (trainer.updates, trainer.skipped, trainer.coverage()) == (1, 1, {})
    assert all(torch.equal(old_weights[n], t) for n, t in trainer.weights())
    assert not any(g.any() for g in trainer.gradients().values())
    _, result = trainer.update([batch], nll, {}, {})
    assert result.skipped == ""
    assert not all(torch.equal(old_weights[n], t) for n, t in trainer.weights())


def test_dropout_is_a_function_of_counters(tmp_path, make_trainer, make_batch, nll):
    path = tiny_model(tmp_path, attention_dropout=0.5)
    batch = make_batch(LENS, loss=nll)

    def losses(seed):
        trainer = make_trainer(path, seed=seed, lr=0.0)
        torch.manual_seed(torch.seed())  # the global random state must have no effect
        return [trainer.update([batch.select([0, 1, 2]), batch], nll, {}, {})[0]["loss"][0] for _ in range(2)]

    a = losses(0)
    assert a == losses(0)
    assert a != losses(1)
    assert a[0] != a[1]
    state = torch.random.get_rng_state()
    trainer = make_trainer(path)
    trainer.update([batch], nll, {}, {})
    [x], [y] = (trainer.forward([batch], ["logprobs"]) for _ in range(2))
    assert torch.equal(x["logprobs"], y["logprobs"])  # none outside of training
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2, "dropout": 0.5}}])
def test_an_evaluation_has_no_dropout_and_changes_no_state(options, tmp_path, make_trainer, make_batch, nll):
    trainer = make_trainer(tiny_model(tmp_path, attention_dropout=0.5), lr=0.1, **options)
    batch = make_batch(LENS, loss=nll)
    trainer.update([batch], nll, {}, {})  # adapters are no longer zero
    [out] = trainer.forward([batch], ["logprobs"])
    parts = [batch.select([0, 1]), batch.select([2, 3, 4])]
    for _ in range(2):
        total, metrics = trainer.evaluate(parts, nll, {}, {})["loss"], trainer.evaluate([batch], nll, {}, {})
        mean = -out["logprobs"].double().sum() / batch.tok["loss_mask"].sum()
        assert total[0] == pytest.approx(float(mean), rel=1e-5)
        assert metrics["loss"][0] == pytest.approx(float(mean), rel=1e-5)
    assert not any(bool(g.any()) for g in trainer.gradients().values())
    assert trainer.update([batch], nll, {}, {})[0]["loss"] != total  # training has it


def test_frozen_roles_hold_no_optimizer(make_trainer, make_batch, nll):
    trainer = make_trainer(trained=False)
    assert trainer.optimizer is None
    assert not any(p.requires_grad for p in trainer.module.parameters())
    assert list(trainer.parameters) == [name for name, _ in trainer.module.named_parameters()]
    with pytest.raises(TrainingError, match=r"role 'policy' is not trained: accumulate\(\)"):
        trainer.accumulate([make_batch(LENS, loss=nll)], nll, {}, {})


def test_scalar_roles_train_values_and_refuse_logprobs(make_trainer, make_batch, squares):
    trainer, batch = make_trainer(head="scalar", lr=1e-2), make_batch(LENS, loss=squares)
    losses = [trainer.update([batch], squares, {}, {})[0]["loss"][0] for _ in range(5)]
    assert losses[-1] < losses[0]
    [out] = trainer.forward([batch], ["values", "scores"])
    assert out["values"].shape == (batch.tokens,)
    assert out["scores"].shape == (batch.sequences,)
    assert not out["values"][~batch.tok["loss_mask"]].any()
    with pytest.raises(TrainingError, match="has a 'scalar' head, which does not give 'logprobs'"):
        trainer.forward([batch], ["logprobs"])
    with pytest.raises(TrainingError, match="has a 'lm' head, which does not give 'values'"):
        make_trainer().forward([batch], ["values"])


def test_ema_follows_and_is_a_view(make_trainer, make_batch, nll):
    trainer, batch = make_trainer(ema_decay=0.75), make_batch(LENS, loss=nll)
    name = "model.norm.weight"
    start = dict(trainer.weights())[name].clone()
    trainer.update([batch], nll, {}, {})
    live = dict(trainer.weights())[name].clone()
    ema = dict(trainer.weights("ema"))[name]
    assert torch.allclose(ema, 0.75 * start + 0.25 * live, atol=1e-7)
    [a], [b] = trainer.forward([batch], ["logprobs"]), trainer.forward([batch], ["logprobs"], "ema")
    assert not torch.equal(a["logprobs"], b["logprobs"])
    assert torch.equal(dict(trainer.weights())[name], live)
    with pytest.raises(CapabilityError, match="no view 'ema': ema_decay is not set"):
        make_trainer().forward([batch], ["logprobs"], "ema")
    with pytest.raises(CapabilityError, match="no view 'base': lora is not set, so it has no adapters"):
        list(trainer.weights("base"))


def test_coverage_names_parameters_that_did_not_change(make_trainer, make_batch, nll):
    class Blind(Loss):
        name = "blind"

        def outputs(self):
            return ("logprobs",)

        def reduce(self):
            return {"blind": Reduce("token_mean")}

        def __call__(self, x):
            return LossOutput({"blind": x["logprobs"] * 0.0})

    batch = make_batch(LENS, loss=nll)
    trainer = make_trainer()
    assert trainer.coverage() == {}
    trainer.update([batch], nll, {}, {})
    assert trainer.coverage() == {"without_gradient": [], "unchanged": []}
    blind = make_trainer()
    blind.update([make_batch(LENS, loss=Blind())], Blind(), {}, {})
    names = list(blind.parameters)
    assert blind.coverage() == {"without_gradient": names, "unchanged": names}
    blind.update([batch], nll, {}, {})
    assert blind.coverage() == {"without_gradient": [], "unchanged": []}, "computed again"


def test_weights_of_one_trainer_load_into_another(tmp_path, make_trainer, make_batch, squares):
    source, target = make_trainer(), make_trainer(tiny_model(tmp_path, seed=3), trained=False)
    batch = make_batch(LENS)
    target.load_weights(source.weights())
    [a], [b] = source.forward([batch], ["logprobs"]), target.forward([batch], ["logprobs"])
    assert torch.equal(a["logprobs"], b["logprobs"])
    with pytest.raises(Exception, match=r"for role 'policy' is of another model: missing \['score.weight'\]"):
        make_trainer(head="scalar").load_weights(source.weights())


def test_several_ranks_are_refused(model_path):
    with pytest.raises(CapabilityError, match="asks for 2"):
        TorchTrainer(None, ModelSpec(RoleSpec("policy"), str(model_path), world_size=2))


@pytest.mark.parametrize("fp32_head", [True, "sums", False])
def test_bf16_stays_near_fp32_with_fp32_weights(make_trainer, make_batch, nll, fp32_head):
    batch = make_batch(LENS, loss=nll)
    gradients = []
    for dtype in ("fp32", "bf16"):
        trainer = make_trainer(dtype=dtype, head_fp32=fp32_head)
        assert trainer.precision.note == f"{dtype} on cpu: as requested"
        [out] = trainer.forward([batch], ["logprobs"])
        assert out["logprobs"].dtype == torch.float32
        trainer.accumulate([batch], nll, {}, {})
        gradients.append(trainer.gradients())
        assert {p.dtype for p in trainer.module.parameters()} == {torch.float32}
    fp32, bf16 = (torch.cat([g.flatten() for g in x.values()]) for x in gradients)
    assert not torch.equal(fp32, bf16)
    assert torch.nn.functional.cosine_similarity(fp32, bf16, 0) > 0.99


def test_values_that_move_by_one_amount_in_both_directions_are_not_unchanged(make_trainer, make_batch, nll):
    """Adam's first step is like this. A check of the sum over the values would see no change."""
    trainer = make_trainer()
    trainer.accumulate([make_batch((7, 9), 0, nll)], nll, {}, {})
    norm = trainer.parameters["model.norm.weight"]
    norm.data.fill_(1.5)
    norm.grad = torch.tensor([1.0, -1.0]).repeat(norm.numel() // 2)
    trainer.apply()
    assert trainer.coverage()["unchanged"] == []
