"""Adapters in PEFT's form: what exports write, and a folder of them as the model of a role."""

from __future__ import annotations

import importlib
import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.config import LoraOptions
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

KINDS = {
    "plain": LoraOptions(rank=4),
    "dora": LoraOptions(rank=4, alpha=12, use_dora=True, use_rslora=True, targets=("q_proj", "down_proj")),
    "saved": LoraOptions(rank=4, modules_to_save=("embed_tokens",)),
    "norms": LoraOptions(rank=4, modules_to_save=("norm", "embed_tokens")),
}


@pytest.fixture(scope="session")
def peft():
    """Its import takes a second, for which a collection of tests need not wait."""
    return importlib.import_module("peft")


def logprobs(trainer, batch, view="live"):
    [out] = trainer.forward([batch], ["logprobs"], view)
    return out["logprobs"]


def spec(path, role="policy", head="lm", trained=True):
    return ModelSpec(RoleSpec(role, head, trained), str(path), "fp32")


@pytest.fixture
def exported(tmp_path, make_trainer, make_batch, nll):
    """A function that trains three steps from a folder and exports; it returns the trainer and its batch."""

    def export(lora, path, out, steps=3):
        trainer, batch = make_trainer(path, lora=lora, lr=0.02), make_batch([9, 30, 4], loss=nll)
        for _ in range(steps):
            trainer.update([batch], nll, {}, {})
        out.mkdir()
        trainer.export(out)
        return trainer, batch

    return export


@pytest.mark.parametrize(("kind", "tied"), [*((kind, True) for kind in KINDS), ("saved", False)])
def test_peft_computes_the_merged_model_from_the_adapter(tmp_path, exported, kind, tied, peft):
    base = tiny_model(tmp_path / "base", tied=tied)
    exported(KINDS[kind], base, tmp_path / "out")
    ids = torch.arange(3, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out" / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        expected = merged(ids).logits
        torch.testing.assert_close(by_peft(ids).logits, expected, atol=1e-4, rtol=0)
        assert (plain(ids).logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_with_the_adapter_and_its_start_is_the_reference(
    tmp_path, make_trainer, exported, kind, nll, monkeypatch
):
    monkeypatch.setattr("peft.peft_model.infer_device", lambda: "mps")  # as on a Mac, where models are on the CPU
    lora, base = KINDS[kind], tiny_model(tmp_path / "base")
    first, batch = exported(lora, base, tmp_path / "one")
    after = logprobs(first, batch)
    adapter = tmp_path / "one" / "adapter"
    second = make_trainer(adapter, lora=lora, lr=0.02)
    torch.testing.assert_close(logprobs(second, batch), after, atol=1e-5, rtol=0)
    for _ in range(2):
        second.update([batch], nll, {}, {})
    assert (logprobs(second, batch) - after).abs().max() > 0.01
    torch.testing.assert_close(logprobs(second, batch, "base"), after, atol=1e-5, rtol=0)
    start = make_trainer(base)
    start.load_weights(second.weights("base"))
    torch.testing.assert_close(logprobs(start, batch), after, atol=1e-5, rtol=0)
    (tmp_path / "two").mkdir()
    second.export(tmp_path / "two")
    config = json.loads((tmp_path / "two" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base), "the base, not the adapter that it started from"
    frozen = make_trainer(tmp_path / "two" / "adapter", trained=False)
    torch.testing.assert_close(logprobs(frozen, batch), logprobs(second, batch), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "norms"])
def test_samples_of_the_base_are_those_of_the_start_also_while_the_average_is_evaluated(
    tmp_path, make_trainer, exported, kind, nll
):
    lora = KINDS[kind]
    first, batch = exported(lora, tiny_model(tmp_path / "base"), tmp_path / "one")
    trainer = make_trainer(tmp_path / "one" / "adapter", lora=lora, lr=0.02, ema_decay=0.5)
    trainer.update([batch], nll, {}, {})
    trainer.use_view("ema")
    generator = TransformersGenerator(None, GeneratorSpec((1,), str))
    generator.load(trainer, 0)
    requests = [GenerationRequest((5, 6, 7), n, Sampling(12), base=base) for n, base in enumerate((True, False, True))]
    turns = dict(generator.generate(requests))
    for number, request in enumerate(requests):
        ids = [*request.ids, *turns[number].ids]
        row = pack([UnitData([SequenceData(ids, {"loss_mask": [n > 0 for n in range(len(ids))]})])])
        expected = logprobs(first if request.base else trainer, row)[len(request.ids) :]
        torch.testing.assert_close(torch.tensor(turns[number].logprobs), expected, atol=1e-5, rtol=0)
    assert trainer.current_view == "ema"
    generator.load(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), 0)
    with pytest.raises(ConfigError, match="request 0 is for the policy's base, which this generator does not have"):
        generator.generate(requests)


def test_all_weights_of_the_merged_model_are_trained_without_lora(tmp_path, make_trainer, exported):
    first, batch = exported(LoraOptions(rank=4), tiny_model(tmp_path / "base"), tmp_path / "one")
    merged = make_trainer(tmp_path / "one" / "adapter")
    torch.testing.assert_close(logprobs(merged, batch), logprobs(first, batch), atol=1e-5, rtol=0)
    assert not any("lora" in name for name in merged.parameters)


def test_a_reward_model_is_read_with_its_head(tmp_path, make_trainer, make_batch, squares, peft):
    base = tiny_model(tmp_path / "base")
    trainer = make_trainer(base, head="scalar", lora=LoraOptions(rank=4), lr=0.02)
    batch = make_batch([9, 12, 7], loss=squares, target=[1.0] * 28)
    for _ in range(3):
        trainer.update([batch], squares, {}, {})
    (tmp_path / "out").mkdir()
    trainer.export(tmp_path / "out")
    adapter = tmp_path / "out" / "adapter"
    shutil.copyfile(tmp_path / "out" / "config.json", adapter / "config.json")  # as the run does
    [expected] = trainer.forward([batch], ["values"])
    frozen = make_trainer(adapter, head="scalar", trained=False)
    [output] = frozen.forward([batch], ["values"])
    torch.testing.assert_close(output["values"], expected["values"], atol=1e-5, rtol=0)
    TorchTrainer.check_files(spec(adapter, "reward", "scalar", trained=False))
    restart = make_trainer(adapter, head="scalar", lora=LoraOptions(rank=4))
    [output] = restart.forward([batch], ["values"])
    torch.testing.assert_close(output["values"], expected["values"], atol=1e-5, rtol=0)
    ids = torch.arange(3, 12)[None]
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    by_peft = peft.AutoPeftModelForSequenceClassification.from_pretrained(adapter, num_labels=1)
    for model in (merged, by_peft):
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = 0
    with torch.no_grad():
        torch.testing.assert_close(by_peft(ids).logits, merged(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"trained": False}, {}, {"lora": LoraOptions(rank=2, targets=("v_proj",))}])
def test_a_reward_model_that_peft_wrote_is_read_with_its_head(tmp_path, make_trainer, make_batch, options, peft):
    """PEFT writes no config.json: that of the base says that the model is a language model."""
    base, folder = tiny_model(tmp_path / "base"), tmp_path / "foreign"
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"], init_lora_weights=False, task_type="SEQ_CLS")
    model = peft.get_peft_model(AutoModelForSequenceClassification.from_pretrained(base, num_labels=1), config)
    model.save_pretrained(folder)
    TorchTrainer.check_files(spec(folder, "reward", "scalar", trained=False))
    head = load_file(folder / "adapter_model.safetensors")["base_model.model.score.weight"]
    trainer = make_trainer(folder, head="scalar", **options)
    assert torch.equal(trainer.loaded_model.head.weight, head)
    assert not trainer.facts().random_head


def test_an_adapter_of_a_token_classifier_stays_one(tmp_path, make_trainer, peft):
    """Its head has a bias, which a sequence classifier would not have."""
    lora, place = LoraOptions(rank=4), tiny_model(tmp_path / "base")
    for number in range(3):
        trainer, out = make_trainer(place, head="classes:2", lora=lora), tmp_path / str(number)
        torch.nn.init.ones_(trainer.loaded_model.head.weight)
        if trainer.loaded_model.head.bias is not None:
            torch.nn.init.ones_(trainer.loaded_model.head.bias)
        out.mkdir()
        trainer.export(out)
        place = out / "adapter" if number < 1 else out
        shutil.copyfile(out / "config.json", out / "adapter" / "config.json")  # as the run does
        ids = torch.arange(3, 12)[None]
        by_peft = peft.AutoPeftModelForTokenClassification.from_pretrained(out / "adapter", num_labels=2)
        with torch.no_grad():
            expected = AutoModelForTokenClassification.from_pretrained(out)(ids).logits
            torch.testing.assert_close(by_peft(ids).logits, expected, atol=1e-5, rtol=0)


def test_an_adapter_that_peft_wrote_is_a_start(tmp_path, make_trainer, make_batch, peft):
    base, folder = tiny_model(tmp_path / "base"), tmp_path / "foreign"
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    ids = torch.arange(3, 30)
    with torch.no_grad():
        expected = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    for lora in (None, LoraOptions(rank=2, alpha=4, targets=("v_proj",))):
        trainer = make_trainer(folder, lora=lora)
        batch = make_batch([27])
        batch.ids_N[:] = ids
        torch.testing.assert_close(logprobs(trainer, batch)[2:], expected[1:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"init_lora_weights": "pissa"}, {"alora_invocation_tokens": [5]}])
def test_an_adapter_beside_another_base_than_its_own_is_not_trained(tmp_path, make_trainer, options, peft):
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["v_proj"], task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model(tmp_path / "base")), config)
    model.save_pretrained(tmp_path / "foreign")
    trained = TorchTrainer.Config(device="cpu", lora=LoraOptions(rank=2, alpha=4, targets=("v_proj",)))
    with pytest.raises(ModelError, match=f"{next(iter(options))} = .* cannot be trained"):
        TorchTrainer.check(trained, spec(tmp_path / "foreign"), "cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_a_module_that_the_adapter_has_trained_is_trained_on(tmp_path, exported, tied):
    """Otherwise the next adapter would lack its values."""
    pair, single = (LoraOptions(rank=4, modules_to_save=names) for names in (("embed_tokens", "lm_head"), ("lm_head",)))
    exported(pair, tiny_model(tmp_path / "base", tied=tied), tmp_path / "out", steps=1)
    with (
        nullcontext() if tied else pytest.raises(ConfigError, match=r"modules_to_save = \['embed_tokens', 'lm_head'\]")
    ):
        trained = TorchTrainer.Config(device="cpu", lora=single)
        TorchTrainer.check(trained, spec(tmp_path / "out" / "adapter"), "cpu")


def test_an_adapter_that_unties_the_head_is_refused(tmp_path, make_trainer, peft):
    base = tiny_model(tmp_path / "base", tied=True)
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "foreign")
    with pytest.raises(ModelError, match="changes the embedding but not the head"):
        make_trainer(tmp_path / "foreign", trained=False)


def test_other_bases_and_options_are_refused_before_anything_is_loaded(tmp_path, exported):
    base, lora = tiny_model(tmp_path / "base"), LoraOptions(rank=4)
    exported(lora, base, tmp_path / "out", steps=1)
    adapter = tmp_path / "out" / "adapter"

    def refused(error, words, options=lora):
        config = TorchTrainer.Config(device="cpu", lora=options)
        with pytest.raises(error, match=words):
            TorchTrainer.check(config, spec(adapter), "cpu")

    refused(ConfigError, r"trainer.lora.rank is 8, .* has 4", LoraOptions(rank=8))
    refused(ConfigError, r"trainer.lora.alpha is 3, .* has 8", LoraOptions(rank=4, alpha=3))
    refused(ConfigError, r"trainer.lora.targets selects 2 layers", LoraOptions(rank=4, targets=("q_proj",)))
    TorchTrainer.check(TorchTrainer.Config(device="cpu", lora=lora), spec(adapter), "cpu")

    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    refused(ModelError, "adapter of a different base .*hash")

    config = json.loads((adapter / "adapter_config.json").read_text())

    def name_base(folder):
        settings = {**config, "base_model_name_or_path": folder}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))

    name_base(str(tiny_model(tmp_path / "other", hidden=48)))
    files = load_file(adapter / "adapter_model.safetensors")
    save_file(files, adapter / "adapter_model.safetensors", {"format": "pt"})  # without the hash
    refused(ModelError, "adapter of a different base .*width")

    name_base(str(tmp_path / "gone"))
    refused(ModelError, "adapter of .*gone, but this folder does not exist")
    name_base(None)
    refused(ModelError, "names no base")
    (adapter / "adapter_config.json").write_text("{")
    refused(ModelError, "cannot be read")
