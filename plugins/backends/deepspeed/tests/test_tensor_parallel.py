"""Ranks that divide layers give the numbers of the trainer ``torch``: two ranks as one replica, four as two replicas.

All tests of a replica are in one class, so that one set of processes serves them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parts_ranks import LORA, MUON, OneReplica, TwoReplicas
from rlhf.errors import CapabilityError
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.parallel_layers import check_sizes
from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.suite_losses import TokenLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from zero_cases import apart, batch, one_rank, shares, spec, trainer

from tests.support.rank_tests import reads
from tests.support.trainer_rank_checks import check_steps
from tests.support.trainer_ranks import Reference, TrainerRanksContract

pytestmark = [pytest.mark.slow, pytest.mark.full]

GRADIENT = 1e-5
DIVIDED = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}
"""{matrix: the dimension along which it is divided}."""


class DividedLayers(TrainerRanksContract):
    """The tests of one and of two replicas."""

    one_rank = staticmethod(one_rank)
    bf16 = (0.06, 0.02, 0.03)
    test_a_rank_writes_its_part_only = None
    """Some ranks alone write what is whole on several, so their files are larger."""

    @reads("equal")
    def test_gradients_of_single_weights(self, ranks, reference, layout):
        gradients = ranks.tensors(f"gradients-{layout}")
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "mlp.down_proj.weight"):
            for layer in ("model.layers.0.", "model.layers.1."):
                gradient, want = gradients[layer + name], reference.gradients[layer + name]
                assert apart({name: gradient}, {name: want}) < 1e-4

    @reads("equal")
    def test_a_rank_holds_half_of_every_matrix_and_what_is_whole_stays_equal(self, ranks, reference, layout):
        reports = ranks("equal", layout)
        assert {rank["share"] for rank in reports} == {2}
        for name, weight in reference.trainer.parameters.items():
            prints = [rank["prints"][name] for rank in reports]
            shape, matrix = list(weight.shape), name.split(".")[-2]
            if matrix in DIVIDED:
                shape[DIVIDED[matrix]] //= 2
                assert prints[0] != prints[1]
                assert prints[::2] == prints[:1] * (ranks.ranks // 2)
            else:
                assert len(set(prints)) == 1
            assert all(rank["shapes"][name] == shape for rank in reports)
        assert [rank["streamed"] for rank in reports] == [len(reference.weights), *[0] * (ranks.ranks - 1)]

    @reads("adapted")
    def test_adapters(self, ranks, lora):
        single = one_rank(spec(ranks.folder), ema_decay=0.9, weight_decay=0.1, lora=LORA[lora]["lora"])
        steps = [single.update([batch(0)], TokenLoss(), {}, {})]
        single.accumulate([batch(0)], TokenLoss(), {}, {})
        gradients = single.gradients()
        single.zero_grad()
        steps += [single.update([batch(number)], TokenLoss(), {}, {}) for number in range(1, 4)]
        reports, key = ranks("adapted", lora), f"lora-{lora}"
        rank_gradients = ranks.tensors(f"gradients-{key}")
        assert apart(rank_gradients, gradients) < GRADIENT
        for n, want in gradients.items():
            assert apart({n: rank_gradients[n]}, {n: want}) < 1e-4, n
        check_steps([rank["steps"] for rank in reports], steps, share=2)
        assert apart(ranks.tensors(f"weights-{key}"), dict(single.weights())) < 1e-5
        assert apart(ranks.tensors(f"average-{key}"), {n: t.clone() for n, t in single.weights("ema")}) < 1e-5
        assert all(rank["coverage"] == single.coverage() for rank in reports)
        for n, factor_weight in single.parameters.items():
            matrix, factor = n.split(".")[-4], n.split(".")[-3]
            dim, shape = DIVIDED[matrix], list(factor_weight.shape)
            cut = factor == ("lora_A" if dim else "lora_B")
            shape[dim] //= 2 if cut else 1
            assert all(rank["shapes"][n] == shape for rank in reports)
            prints = [rank["prints"][n] for rank in reports]
            assert prints[::2] == prints[:1] * (ranks.ranks // 2)
            assert (prints[0] != prints[1]) is cut
        restart = trainer(spec(ranks.folder), stage=3, ema_decay=0.9, weight_decay=0.1, lora=LORA[lora]["lora"])
        restart.load(ranks.folder / f"saved-{key}")
        saved = ranks.tensors(f"weights-{key}")
        assert all(torch.equal(tensor, saved[n]) for n, tensor in restart.weights())

    @reads("muon")
    def test_muon(self, ranks, muon):
        single = trainer(spec(ranks.folder), optimizer="muon", weight_decay=0.1, **MUON[muon])
        steps = [single.update([batch(number)], TokenLoss(), {}, {}) for number in range(3)]
        check_steps([rank["steps"] for rank in ranks("muon", muon)], steps, share=2)
        assert apart(ranks.tensors(f"weights-muon-{muon}"), dict(single.weights())) < 1e-4
        plain = trainer(spec(ranks.folder), weight_decay=0.1, **MUON[muon])
        for number in range(3):
            plain.update([batch(number)], TokenLoss(), {}, {})
        assert apart(dict(plain.weights()), dict(single.weights())) > 1e-3, "the optimizer makes a difference"


class TestOneReplica(DividedLayers):
    cases = OneReplica

    @reads("adapters")
    def test_weights_and_exports_have_the_adapters_merged(self, ranks, tmp_path):
        single = trainer(spec(ranks.folder), **LORA["all"])
        single.load(ranks.folder / "adapters")
        single.export(tmp_path / "one")
        list(single.buckets())
        assert ranks("adapters")[0] == single.sent_fingerprints()
        for file in ("adapter/adapter_model.safetensors", "model.safetensors"):
            tensors, want = (load_file(folder / file) for folder in (ranks.folder / "export-lora", tmp_path / "one"))
            assert tensors.keys() == want.keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in want.items())
        base, plain = ranks.tensors("base"), trainer(spec(ranks.folder, trained=False), stage=2)
        assert all(torch.equal(base[name], tensor) for name, tensor in plain.weights())
        assert apart(tensors, base) > 1e-3
        scores, dealt = ranks.tensors("scores-lora"), shares(batch(9), 1)[0]
        for view in ("live", "base"):
            [want] = single.forward(dealt[:1], ("logprobs",), view)
            torch.testing.assert_close(scores[view], want["logprobs"], atol=1e-5, rtol=0)

    @reads("model")
    def test_layers_of_other_architectures_are_divided(self, ranks, kind):
        reference = Reference(one_rank(replace(spec(ranks.folder), path=str(ranks.folder / kind))), TokenLoss(), 2)
        assert apart(ranks.tensors(f"gradients-{kind}"), reference.gradients) < GRADIENT
        check_steps([rank["steps"] for rank in ranks("model", kind)], reference.steps, share=2)
        assert apart(ranks.tensors(f"weights-{kind}"), reference.weights) < 1e-4

    @reads("beside")
    def test_roles_with_and_without_divided_layers_work_in_one_process(self, ranks):
        norms = [result.grad_norm for _, result in Reference(one_rank(spec(ranks.folder)), TokenLoss(), 2).steps]
        for report in ranks("beside"):
            assert report == pytest.approx([norms[0], norms[0], norms[1], norms[0]], rel=1e-4)

    @reads("exported")
    def test_export_and_fingerprints_are_whole(self, ranks, tmp_path):
        single = one_rank(spec(ranks.folder))
        single.export(tmp_path / "torch")
        tensors, want = (
            load_file(folder / "model.safetensors") for folder in (ranks.folder / "export", tmp_path / "torch")
        )
        assert tensors.keys() == want.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in want.items())
        AutoModelForCausalLM.from_pretrained(ranks.folder / "export")
        for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert (ranks.folder / "export" / name).read_text() == (tmp_path / "torch" / name).read_text()
        list(single.buckets())
        assert ranks("exported")[0] == single.sent_fingerprints()

    @reads("refused")
    def test_models_that_cannot_be_divided_are_refused(self, ranks):
        first, second = ranks("refused")
        assert first == second
        heads = "does not divide Qwen3ForCausalLM's num_attention_heads = 3, num_key_value_heads = 1: use"
        assert heads in first["heads"]
        assert (
            "has dropout or other noise, and its ranks would draw the same noise for different heads"
            in first["dropout"]
        )
        layers = "Olmo2ForCausalLM has 2 layers, but only 0 are of a supported kind (Gemma2"
        assert layers in first["layers"]


class TestTwoReplicas(DividedLayers):
    cases = TwoReplicas
    world = 4


# ------------------------------------------------------------------------------------- refused


def test_sizes_of_every_layer_are_checked():
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("gemma4_text", **sizes, per_layer_config={"1": {"num_key_value_heads": 1}})
    check_sizes(config, "the model", 1)
    with pytest.raises(CapabilityError, match="does not divide the model's num_key_value_heads = 1: use"):
        check_sizes(config, "the model", 2)


def test_a_tensor_parallel_that_does_not_divide_the_ranks_is_refused(tmp_path):
    tiny_model(tmp_path / "model")
    with pytest.raises(
        CapabilityError, match=r"tensor_parallel = 2 does not divide the 1 ranks of role 'policy': set "
    ):
        trainer(spec(tmp_path), stage=2, tensor_parallel=2)
    with pytest.raises(CapabilityError, match=r"placement\.policy\.ranks = 4"):
        DeepSpeedTrainer.check(DeepSpeedTrainerConfig(tensor_parallel=2), spec(tmp_path, 0, 3, "1"), "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, "stage = 3, which already divides every weight by its elements; use stage 0, 1 or 2"),
        (
            {"lora": {"rank": 2, "dropout": 0.1}},
            "lora.dropout, which would draw the same mask on every rank, for different parts of a",
        ),
        ({"lora": {"rank": 2, "use_dora": True}}, "lora.use_dora, which needs the length of whole rows"),
        ({"neftune_alpha": 5.0}, "neftune_alpha, which would add different noise to the embeddings of each rank"),
    ],
)
def test_options_that_exclude_tensor_parallel_are_refused(options, message):
    with pytest.raises(ValueError, match="tensor_parallel = 2 cannot be combined with ") as error:
        DeepSpeedTrainerConfig(tensor_parallel=2, **options)
    assert message in str(error.value)


def test_image_text_models_are_not_divided(tmp_path):
    path = str(tiny_image_model(tmp_path / "model"))
    for option in ("tensor_parallel", "sequence_parallel"):
        config, model_spec = DeepSpeedTrainerConfig(**{option: 2}), replace(spec(tmp_path, 0, 2, "1"), path=path)
        with pytest.raises(CapabilityError, match=rf"{option} = 2 divides .* 'policy' has an image-text model"):
            DeepSpeedTrainer.check(config, model_spec, "cpu")
