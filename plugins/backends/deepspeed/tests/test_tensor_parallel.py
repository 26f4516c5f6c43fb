"""Ranks that divide layers give the numbers of the trainer ``torch``: two ranks as one replica, four as two replicas.

All tests are in one file, so that one set of processes serves them (``pytest --dist loadfile``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parts_cases import Ranks, Reference, check_steps, models
from parts_names import LORA, MODELS, MUON, STAGES, VARIANTS
from rlhf.errors import CapabilityError
from rlhf_modeling.adapters import LoraOptions
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.suite_losses import LentLoss, TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zero_cases import STEPS, apart, batch, shares, spec, trainer

pytestmark = [pytest.mark.slow, pytest.mark.full]

GRADIENT = 1e-5
DIVIDED = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
"""{matrix: the dimension along which it is divided}."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Ranks(models(tmp_path_factory.mktemp("pair")), 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return Ranks(models(tmp_path_factory.mktemp("four")), 4)


@pytest.fixture(params=["pair", "four"])
def ranks(request):
    """One replica of two ranks, and two such replicas."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    tiny_model(folder / "model", std=0.2)
    return Reference(folder, TokenLoss(), STEPS, ema_decay=0.9, weight_decay=0.1)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_and_five_steps(ranks, reference, stage):
    found = ranks(f"equal-{stage}")
    assert apart(ranks.tensors(f"gradients-{stage}"), reference.gradients) < GRADIENT
    for name in (
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "mlp.down_proj.weight",
    ):  # each by itself
        for layer in ("model.layers.0.", "model.layers.1."):
            one, want = ranks.tensors(f"gradients-{stage}")[layer + name], reference.gradients[layer + name]
            assert apart({name: one}, {name: want}) < 1e-4
    check_steps([rank["steps"] for rank in found], reference.steps)
    assert len(found[0]["steps"]) == STEPS
    assert {rank["micros"] for rank in found} == {len(shares(batch(0), ranks.ranks // 2)[0])}
    assert apart(ranks.tensors(f"weights-{stage}"), reference.weights) < 1e-4
    average = {n: t.clone() for n, t in reference.trainer.weights("ema")}
    assert apart(ranks.tensors(f"average-{stage}"), average) < 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_scores_evaluation_and_coverage(ranks, reference, stage):
    found = ranks(f"equal-{stage}")
    for rank, dealt in enumerate(share for share in shares(batch(9), ranks.ranks // 2) for _ in range(2)):
        got = ranks.tensors(f"scores-{stage}-{rank}")
        for n, want in enumerate(reference.trainer.forward(dealt, ("logprobs",))):
            torch.testing.assert_close(got[str(n)], want["logprobs"], atol=1e-3, rtol=0)  # after five steps of Adam
    want = reference.trainer.evaluate([batch(9)], TokenLoss(), {}, {})["loss"][0]
    assert sum(rank["evaluated"] for rank in found[::2]) == pytest.approx(want, rel=1e-3)
    assert all(rank["coverage"] == reference.trainer.coverage() for rank in found)
    assert {rank["share"] for rank in found} == {2}


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_holds_half_of_every_matrix_and_what_is_whole_stays_equal(ranks, reference, stage):
    found = ranks(f"equal-{stage}")
    for name, whole in reference.trainer.parameters.items():
        prints = [rank["prints"][name] for rank in found]
        shape, matrix = list(whole.shape), name.split(".")[-2]
        if matrix in DIVIDED:
            shape[DIVIDED[matrix]] //= 2
            assert prints[0] != prints[1]
            assert prints[::2] == prints[:1] * (ranks.ranks // 2)
        else:
            assert len(set(prints)) == 1
        assert all(rank["shapes"][name] == shape for rank in found)
    assert [rank["weights"] for rank in found] == [len(reference.weights), *[0] * (ranks.ranks - 1)]


@pytest.mark.parametrize("name", VARIANTS)
def test_options_change_no_number(pair, name):
    options = VARIANTS[name]
    other = {key: options[key] for key in ("max_grad_norm", "dtype", "storage") if key in options}
    reference = Reference(pair.folder, TokenLoss(), 3, **other)
    found = [rank["steps"] for rank in pair(f"variant-{name}")]
    gradients = pair.tensors(f"gradients-{name}")
    if options.get("dtype") == "bf16":  # another order of rounding; bf16 differs from fp32 by 9 % in this measure
        exact = Reference(pair.folder, TokenLoss(), 0)
        assert apart(gradients, reference.gradients) < 0.06
        assert 1e-3 < apart(gradients, exact.gradients) < 0.2
        check_steps(found, reference.steps, 0.02, 0.03)
        return
    assert apart(gradients, reference.gradients) < GRADIENT
    check_steps(found, reference.steps)
    assert apart(pair.tensors(f"weights-{name}"), reference.weights) < 1e-4


@pytest.mark.parametrize("name", LORA)
def test_adapters(ranks, name):
    one = TorchTrainer(
        TorchTrainer.Config(lr=1e-3, device="cpu", ema_decay=0.9, weight_decay=0.1, lora=LoraOptions(**LORA[name])),
        spec(ranks.folder),
    )
    wanted = [one.update([batch(0)], TokenLoss(), {}, {})]
    one.accumulate([batch(0)], TokenLoss(), {}, {})
    gradients = one.gradients()
    one.zero_grad()
    wanted += [one.update([batch(number)], TokenLoss(), {}, {}) for number in range(1, 4)]
    found, key = ranks(f"lora-{name}"), f"lora-{name}"
    got = ranks.tensors(f"gradients-{key}")
    assert apart(got, gradients) < GRADIENT
    for n, want in gradients.items():
        assert apart({n: got[n]}, {n: want}) < 1e-4, n
    check_steps([rank["steps"] for rank in found], wanted)
    assert apart(ranks.tensors(f"weights-{key}"), dict(one.weights())) < 1e-5
    assert apart(ranks.tensors(f"average-{key}"), {n: t.clone() for n, t in one.weights("ema")}) < 1e-5
    assert all(rank["coverage"] == one.coverage() for rank in found)
    for n, whole in one.parameters.items():
        matrix, factor = n.split(".")[-4], n.split(".")[-3]
        dim, shape = DIVIDED[matrix], list(whole.shape)
        cut = factor == ("lora_A" if dim else "lora_B")
        shape[dim] //= 2 if cut else 1
        assert all(rank["shapes"][n] == shape for rank in found)
        prints = [rank["prints"][n] for rank in found]
        assert prints[::2] == prints[:1] * (ranks.ranks // 2)
        assert (prints[0] != prints[1]) is cut
    again = trainer(spec(ranks.folder), stage=3, ema_decay=0.9, weight_decay=0.1, lora=LoraOptions(**LORA[name]))
    again.load(ranks.folder / f"saved-{key}")
    saved = ranks.tensors(f"weights-{key}")
    assert all(torch.equal(tensor, saved[n]) for n, tensor in again.weights())


def test_weights_and_exports_have_the_adapters_merged(pair, tmp_path):
    one = trainer(spec(pair.folder), stage=2, lora=LoraOptions(**LORA["all"]))
    one.load(pair.folder / "adapters")
    one.export(tmp_path / "one")
    list(one.buckets())
    assert pair("adapters")[0] == one.sent()
    got, want = (load_file(folder / "model.safetensors") for folder in (pair.folder / "export-lora", tmp_path / "one"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    base, plain = pair.tensors("base"), trainer(spec(pair.folder, trained=False), stage=2)
    assert all(torch.equal(base[name], tensor) for name, tensor in plain.weights())
    assert apart(got, base) > 1e-3
    scores, dealt = pair.tensors("scores-lora"), shares(batch(9), 1)[0]
    for view in ("live", "base"):
        [want] = one.forward(dealt[:1], ("logprobs",), view)
        torch.testing.assert_close(scores[view], want["logprobs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MUON)
def test_muon(ranks, name):
    options = {**MUON[name], **({"lora": LoraOptions(**MUON[name]["lora"])} if "lora" in MUON[name] else {})}
    one = trainer(spec(ranks.folder), optimizer="muon", weight_decay=0.1, **options)
    wanted = [one.update([batch(number)], TokenLoss(), {}, {}) for number in range(3)]
    check_steps([rank["steps"] for rank in ranks(f"muon-{name}")], wanted)
    assert apart(ranks.tensors(f"weights-muon-{name}"), dict(one.weights())) < 1e-4
    plain = trainer(spec(ranks.folder), weight_decay=0.1, **options)
    for number in range(3):
        plain.update([batch(number)], TokenLoss(), {}, {})
    assert apart(dict(plain.weights()), dict(one.weights())) > 1e-3, "the optimizer makes a difference"


@pytest.mark.parametrize("kind", MODELS)
def test_layers_of_other_architectures_are_divided(pair, kind):
    reference = Reference(pair.folder, TokenLoss(), 2, path=kind)
    assert apart(pair.tensors(f"gradients-{kind}"), reference.gradients) < GRADIENT
    check_steps([rank["steps"] for rank in pair(f"model-{kind}")], reference.steps)
    assert apart(pair.tensors(f"weights-{kind}"), reference.weights) < 1e-4


def test_critic(pair):
    reference = Reference(pair.folder, ValueLoss(), 3, head="scalar")
    assert apart(pair.tensors("gradients-critic"), reference.gradients) < GRADIENT
    check_steps([rank["steps"] for rank in pair("critic")], reference.steps)


def test_roles_that_are_not_trained(pair, reference):
    for found in pair("frozen"):
        assert found["moved"] > 1e-2
        assert found["left"] < 1e-5
        assert found["prints"], "each rank has fingerprints of its part"
        assert found["every_rank"] == len(reference.weights)


def test_a_lent_head_is_whole(pair):
    lender = TorchTrainer(
        TorchTrainer.Config(device="cpu"), replace(spec(pair.folder, trained=False), path=str(pair.folder / "lender"))
    )
    one = TorchTrainer(TorchTrainer.Config(device="cpu"), spec(pair.folder))
    one.borrow_head("lender", *lender.lend_head())
    whole = batch(0, LentLoss())
    [hidden] = lender.forward([whole], ("hidden",))
    sums = one.accumulate([whole.with_column("tok", "lent_hidden", hidden["hidden"])], LentLoss(), {}, {})
    assert [rank["loss"] for rank in pair("lent")] == [pytest.approx(sums["loss"][0], rel=1e-5)] * 2
    assert apart(pair.tensors("gradients-lent"), one.gradients()) < GRADIENT


def test_a_non_finite_loss_or_gradient_skips_the_step_on_every_rank(ranks):
    found = ranks("skip")
    assert all(rank == found[0] for rank in found)
    loss, gradient, after = found[0]
    assert loss[0].startswith("non-finite loss (nan) of 'suite_infinite'")
    assert gradient[0].startswith("non-finite gradient (norm ")
    assert loss[1] is gradient[1] is True
    assert after == ["", True]  # the step after the skipped ones is as without them


def test_roles_with_and_without_divided_layers_work_in_one_process(pair, reference):
    norms = [result.grad_norm for _, result in Reference(pair.folder, TokenLoss(), 2).steps]
    for found in pair("beside"):
        assert found == pytest.approx([norms[0], norms[0], norms[1], norms[0]], rel=1e-4)


# -------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_exact_and_continues_from_one_rank(ranks, stage):
    one = trainer(spec(ranks.folder), stage=2, ema_decay=0.9)
    one.load(ranks.folder / "from_one")
    want = [one.update([batch(number)], TokenLoss(), {}, {}) for number in range(2, 5)]
    found = ranks(f"resume-{stage}")
    assert all(rank["bits"] and rank["steps"][0] == rank["steps"][1] for rank in found)
    check_steps([rank["from_one"] for rank in found], want, 1e-6, 1e-5)


@pytest.mark.parametrize("saved", STAGES)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_resumes_from_parts_in_any_stage(ranks, saved, stage):
    one = trainer(spec(ranks.folder), stage=stage, ema_decay=0.9)
    one.load(ranks.folder / f"saved-{saved}")
    want = [one.update([batch(number)], TokenLoss(), {}, {}) for number in range(2, 5)]
    check_steps([rank["steps"][0] for rank in ranks(f"resume-{saved}")], want, 1e-6, 1e-5)


def test_export_and_fingerprints_are_whole(pair, tmp_path):
    one = TorchTrainer(TorchTrainer.Config(device="cpu"), spec(pair.folder))
    one.export(tmp_path / "torch")
    got, want = (load_file(folder / "model.safetensors") for folder in (pair.folder / "export", tmp_path / "torch"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    AutoModelForCausalLM.from_pretrained(pair.folder / "export")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (pair.folder / "export" / name).read_text() == (tmp_path / "torch" / name).read_text()
    list(one.buckets())
    assert pair("export")[0] == one.sent()


# ------------------------------------------------------------------------------------- refused


def test_models_that_cannot_be_divided_are_refused(pair):
    first, second = pair("refused")
    assert first == second
    assert "does not divide Qwen3ForCausalLM's num_attention_heads = 3, num_key_value_heads = 1: use" in first["heads"]
    assert "has dropout or other noise, and its ranks would draw the same for different heads" in first["dropout"]
    assert "Olmo2ForCausalLM has 2 layers, of which 0 are of a kind whose division is known (Gemma2" in first["layers"]


def test_a_tensor_parallel_that_does_not_divide_the_ranks_is_refused(pair):
    with pytest.raises(
        CapabilityError, match=r"tensor_parallel = 2 does not divide the 1 ranks of role 'policy': set "
    ):
        trainer(spec(pair.folder), stage=2, tensor_parallel=2)
    with pytest.raises(CapabilityError, match=r"placement\.policy\.ranks = 4"):
        DeepSpeedTrainer.check(DeepSpeedTrainerConfig(tensor_parallel=2), spec(pair.folder, 0, 3, "1"), "cpu")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"stage": 3}, "stage = 3, which divides every weight by its elements already; use stage 0, 1 or 2"),
        (
            {"lora": {"rank": 2, "dropout": 0.1}},
            "lora.dropout, which would draw one mask for different parts of a",
        ),
        ({"lora": {"rank": 2, "use_dora": True}}, "lora.use_dora, which needs the length of whole rows"),
        ({"neftune_alpha": 5.0}, "neftune_alpha, which would add different noise to the embeddings of each rank"),
    ],
)
def test_options_that_exclude_tensor_parallel_are_refused(options, why):
    with pytest.raises(ValueError, match="tensor_parallel = 2 does not go with ") as error:
        DeepSpeedTrainerConfig(tensor_parallel=2, **options)
    assert why in str(error.value)


def test_image_text_models_are_not_divided(tmp_path):
    path = str(tiny_image_model(tmp_path / "model"))
    for option in ("tensor_parallel", "sequence_parallel"):
        config, of = DeepSpeedTrainerConfig(**{option: 2}), replace(spec(tmp_path, 0, 2, "1"), path=path)
        with pytest.raises(CapabilityError, match=rf"{option} = 2 divides .* 'policy' has an image-text model"):
            DeepSpeedTrainer.check(config, of, "cpu")
