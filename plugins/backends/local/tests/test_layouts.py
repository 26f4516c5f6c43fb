"""Models that are packed, and models that are computed one length at a time. Both give the numbers of transformers."""

from __future__ import annotations

import json

import pytest
import torch
from rlhf.errors import CapabilityError, ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.model import load_model
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.support.tiny_architectures import tiny_architecture

LENS = [9, 30, 3, 30, 21]
LONGROPE = {
    "architecture": "phi3",
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 16,  # Phi-3 takes the threshold from here
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 16,
    },
}
DYNAMIC = {
    "architecture": "llama",
    "max_position_embeddings": 16,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def load(path, head="lm", trained=True):
    return load_model(ModelSpec(RoleSpec("policy", head, trained), str(path)), torch.device("cpu"))


def one_by_one(path, batch):
    """Log-probs and gradients of transformers' eager attention, with a new module for each sequence."""
    logprobs, gradients = [], {}
    for ids in batch.ids_N.split(batch.lens_B.tolist()):
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
        logp = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        answer_logprobs = logp.gather(1, ids[1:, None])[1:, 0]  # like loss_mask, from the third token on
        (-answer_logprobs.sum() / sum(n - 2 for n in batch.lens_B.tolist())).backward()
        logprobs.append(answer_logprobs.detach())
        for name, p in model.named_parameters():
            if p.grad is not None:
                gradients[name] = gradients.get(name, 0.0) + p.grad
    return torch.cat(logprobs), gradients


def check(path, trainer, batch, nll):
    want, gradients = one_by_one(path, batch)
    for micros in ([batch], [batch.select([u]) for u in range(batch.units)]):
        values = trainer.forward(micros, ["logprobs"])
        logprobs = torch.cat([v["logprobs"][m.tok["loss_mask"]] for m, v in zip(micros, values, strict=True)])
        assert (logprobs - want).abs().max() < 1e-5
        trainer.accumulate(micros, nll, {}, {})
        trainer_gradients = trainer.gradients()
        trainer.zero_grad()
        distance = torch.cat([(trainer_gradients[n] - g).flatten() for n, g in gradients.items()]).norm()
        assert distance <= 1e-5 * torch.cat([g.flatten() for g in gradients.values()]).norm()


@pytest.mark.parametrize("options", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_rotary_frequencies_depend_on_the_length_of_each_sequence(options, tmp_path, make_trainer, make_batch, nll):
    path = tiny_model(tmp_path, **options)
    check(path, make_trainer(path), make_batch(LENS, loss=nll), nll)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *((name, False) for name in ("qwen3_next", "lfm2", "mamba2", "gpt_oss", "llama4_text")),
        ("qwen3_next", True),
        ("gpt_oss", True),
    ],
)
def test_models_that_cannot_be_packed_are_computed_one_length_at_a_time(
    name, checkpointing, tmp_path, make_trainer, make_batch, nll
):
    path = tiny_architecture(tmp_path, name)
    trainer = make_trainer(path, gradient_checkpointing=checkpointing)
    [note] = trainer.facts().notes
    assert note.startswith("policy: ")
    assert "cannot be computed packed (" in note
    assert trainer.facts().shares_prefixes is False
    calls = []
    trainer.module.get_input_embeddings().register_forward_hook(lambda _, x, y: calls.append(tuple(x[0].shape)))
    trainer.forward([make_batch(LENS)], ["logprobs"])
    assert calls == [(1, 3), (1, 9), (1, 21), (2, 30)]
    check(path, trainer, make_batch(LENS, loss=nll), nll)


def test_a_window_that_only_a_mask_knows_is_found(tmp_path):
    """Phi-MoE has its window only in the mask that transformers builds, not in the arguments of attention."""
    path = tiny_architecture(tmp_path, "phimoe")
    model = load(path)
    assert model.layout == "alone"
    saved = json.loads((path / "config.json").read_text())["sliding_window"]
    assert model.module.config.sliding_window == saved > 4, "restored after the probe"


def test_a_tensor_that_packed_attention_does_not_read_is_found(tmp_path):
    """MiniMax M3 lists the blocks that a token may attend to. The effect appears only beyond the length of a probe."""
    assert load(tiny_architecture(tmp_path, "minimax_m3_vl_text")).layout == "alone"


def test_gradient_checkpointing_that_transformers_does_not_have_is_refused(tmp_path, make_trainer):
    with pytest.raises(
        CapabilityError, match=r"CTRLLMHeadModel cannot recompute its layers in the .* gradient_checkpointing = false"
    ):
        make_trainer(tiny_architecture(tmp_path, "ctrl"), gradient_checkpointing=True)


def test_ordinary_models_are_packed_without_a_note(model_path, make_trainer):
    for head in ("lm", "scalar"):
        trainer = make_trainer(model_path, head=head)
        assert (trainer.loaded_model.layout, trainer.loaded_model.boundaries, trainer.facts().notes) == (
            "shared",
            False,
            (),
        )
    assert make_trainer(model_path).facts().shares_prefixes


def test_adapters_at_the_default_learning_rate_are_noted(model_path, make_trainer):
    [note] = make_trainer(model_path, lora=LoraOptions(rank=2), lr=1e-6).facts().notes
    assert note.startswith("policy: trainer.lr is 1e-06, the default, at which adapters learn very slowly.")
    assert make_trainer(model_path, lora=LoraOptions(rank=2), lr=1e-4).facts().notes == ()


def test_only_trained_parameters_are_counted(model_path, make_trainer):
    weights = load_file(model_path / "model.safetensors")
    adapters = make_trainer(model_path, lora=LoraOptions(rank=2))
    assert make_trainer(model_path).facts().trained_parameters == sum(t.numel() for t in weights.values())
    assert adapters.facts().trained_parameters == sum(p.numel() for n, p in adapters.parameters.items() if "lora" in n)
    assert make_trainer(model_path, trained=False).facts().trained_parameters == 0


def test_noise_in_training_is_recognised_by_any_name(tmp_path, make_trainer, make_batch, nll, monkeypatch):
    options = {"architecture": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    path = tiny_model(tmp_path / "jitter", **options, router_jitter_noise=0.1)
    trainer = make_trainer(path)
    assert trainer.facts().shares_prefixes is False
    [note] = trainer.facts().notes
    assert "draws noise while it is trained (router_jitter_noise = 0.1 in its config)" in note
    assert make_trainer(path, trained=False).facts().notes == ()
    quiet = tiny_model(tmp_path / "quiet", **options)
    assert make_trainer(quiet).facts().shares_prefixes
    table = torch.nn.Embedding
    forward = table.forward
    monkeypatch.setattr(table, "forward", lambda self, ids: F.dropout(forward(self, ids), 0.1, self.training))
    assert make_trainer(quiet).facts().shares_prefixes is False


def test_a_model_that_sees_later_tokens_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"BertLMHeadModel .* is not causal: .* set is_decoder in its config"):
        load(tiny_architecture(tmp_path, "bert as an encoder"))


def test_weights_that_are_not_finite_are_refused(tmp_path):
    path = tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"hidden states that are not finite numbers: its weights are damaged"):
        load(path)


def test_a_model_that_transformers_cannot_compute_is_refused_with_the_reason(tmp_path):
    with pytest.raises(ModelError, match=r"cannot be computed by transformers from token ids alone \(ValueError: "):
        load(tiny_architecture(tmp_path, "reformer"))


def test_kernels_for_packed_rows_are_refused_for_models_that_are_not_packed(tmp_path, make_trainer, monkeypatch):
    path = tiny_architecture(tmp_path, "mamba2")
    with pytest.raises(CapabilityError, match=r"trainer\.kernels = 'own': not all layers of Mamba2"):
        make_trainer(path, kernels="own")
    monkeypatch.setattr("rlhf_modeling.trainer.check_kernel", lambda *_: None)  # as on a GPU
    monkeypatch.setattr("rlhf_modeling.option_checks.check_kernel", lambda *_: None)
    with pytest.raises(CapabilityError, match=r"'flash' chooses a kernel for packed attention, but Mamba2"):
        make_trainer(path, attention="flash")


def test_the_generator_refuses_a_model_without_packing_if_log_probs_differ(tmp_path, make_trainer, build):
    generator, sinks = build(), make_trainer(tiny_architecture(tmp_path / "a", "gpt_oss"))
    generator.load(sinks, 3)
    assert sinks.module.config.sliding_window > 4, "restored after the comparison"
    with pytest.raises(
        ModelError, match=r"PhimoeForCausalLM computes different log-probs with the attention of this gen"
    ):
        generator.load(make_trainer(tiny_architecture(tmp_path / "b", "phimoe")), 3)


def test_embedding_noise_depends_on_the_sequences_length_in_every_layout(tmp_path, make_trainer, make_batch, nll):
    trainer = make_trainer(tiny_architecture(tmp_path, "mamba2"), neftune_alpha=5.0)
    noises = []
    table = trainer.module.get_input_embeddings()
    table.register_forward_hook(lambda _, x, y: noises.append((y - F.embedding(x[0], table.weight)).detach()))
    trainer.accumulate([make_batch(LENS, loss=nll)], nll, {}, {})
    for added in noises:
        bound = 5.0 / (added.shape[1] * added.shape[2]) ** 0.5
        assert 0.8 * bound < added.abs().max() <= bound * (1 + 1e-4)


# ------------------------------------------------------------------------------------ kernels with boundaries


def bounded_convolution(hidden_states, weight, bias=None, activation=None, seq_idx=None, **_):
    """The convolution of each sequence of a packed row by itself, like the package causal_conv1d on a GPU."""
    parts = [hidden_states]
    if seq_idx is not None:
        parts = hidden_states.split(seq_idx[0].unique_consecutive(return_counts=True)[1].tolist(), 2)
    done = [F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0]) for x in parts]
    out = torch.cat(done, 2)
    return F.silu(out) if activation == "silu" else out


def test_recurrent_layers_are_packed_if_their_kernels_take_boundaries(
    tmp_path, monkeypatch, make_trainer, make_batch, nll
):
    """On a GPU transformers takes these kernels from the packages fla and causal_conv1d. Here torch is used."""
    plain = qwen3_next.torch_chunk_gated_delta_rule

    def bounded_rule(query, key, value, g, beta, cu_seqlens=None, seq_idx=None, **options):
        if cu_seqlens is None:
            return plain(query, key, value, g=g, beta=beta, **options)
        cuts = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        split = [[x[:, a:b] for x in (query, key, value, g, beta)] for a, b in cuts]
        return torch.cat([plain(q, k, v, g=d, beta=e, **options)[0] for q, k, v, d, e in split], 1), None

    path = tiny_architecture(tmp_path, "qwen3_next")
    monkeypatch.setattr(qwen3_next, "causal_conv1d_fn", bounded_convolution)
    assert load(path).layout == "alone", "one of the two kernels is not enough"
    monkeypatch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", bounded_rule)
    trainer = make_trainer(path)
    assert (trainer.loaded_model.layout, trainer.loaded_model.boundaries) == ("packed", True)
    assert trainer.facts().notes == ()
    check(path, trainer, make_batch(LENS, loss=nll), nll)


@pytest.mark.parametrize("lens", [[7, 12, 5], [70, 70, 70, 33], [170, 9, 170, 170, 200, 3], [1, 2, 1]])
def test_logprobs_equal_one_sequence_at_a_time(lens, make_trainer, make_batch):
    """Equal up to rounding: a matrix library may choose another kernel for another number of rows."""
    trainer = make_trainer(trained=False)
    batch = make_batch(lens)
    [outputs] = trainer.forward([batch], ["logprobs", "entropy"])
    singles = trainer.forward([batch.select([u]) for u in range(len(lens))], ["logprobs", "entropy"])
    for name, value in outputs.items():
        assert (value - torch.cat([part[name] for part in singles])).abs().max() < 3e-6, name
