"""Options of image-text models in the trainer: scalar heads, frozen vision towers, adapters, exports; refusals."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from rlhf.errors import ConfigError, ModelError, TrainingError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.adapters import adapted, is_adapter
from rlhf_modeling.images.architecture import vision_parameters, vision_prefixes
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing import image_models
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.tiny import tiny_model
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.image_batches import SEQUENCES, PlainImageModel, image_batch
from tests.support.losses import NllLoss

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_image_model(tmp_path_factory.mktemp(FAMILY), FAMILY)


@pytest.fixture(scope="module")
def batch(path):
    return image_batch(path, FAMILY)


def spec_of(path, head="lm", trained=True, **options):
    role = RoleSpec("critic" if head != "lm" else "policy", head, trained)
    return ModelSpec(role, str(path), **{"dtype": "fp32", "seed": 3, "total_updates": 5, "images": True, **options})


def trainer_of(path, head="lm", trained=True, options=None, **config):
    config = TorchTrainerConfig(device="cpu", lr=1e-3, **config)
    return TorchTrainer(config, spec_of(path, head, trained, **(options or {})))


def test_a_critic_is_the_body_with_a_fresh_head_and_is_read_again(path, batch, tmp_path):
    critic = trainer_of(path, "scalar")
    batch = replace(batch, tok={"action_mask": batch.tok["loss_mask"], **batch.tok})
    values = critic.forward([batch], ("values",))[0]["values"]
    plain = PlainImageModel(path, FAMILY)
    with torch.no_grad():
        hidden = torch.cat([plain.model.model(**plain.inputs(p)).last_hidden_state[0] for p in SEQUENCES])
    expected, mask = (hidden @ critic.loaded_model.head.weight[0].detach()).roll(1), batch.tok["action_mask"]
    torch.testing.assert_close(values[mask], expected[mask], atol=1e-5, rtol=0)
    critic.export(tmp_path / "critic")
    shutil.copy(path / "processor_config.json", tmp_path / "critic")
    copy_of_critic = trainer_of(tmp_path / "critic", "scalar", trained=False)
    torch.testing.assert_close(copy_of_critic.forward([batch], ("values",))[0]["values"], values, atol=1e-6, rtol=0)


def test_an_export_is_read_by_transformers_and_training_goes_on(path, batch, tmp_path):
    trainer = trainer_of(path)
    trainer.update([batch], NllLoss(), {}, {})
    logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"]
    trainer.export(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    parameters = dict(trainer.module.named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())
    assert torch.equal(trainer.forward([batch], ("logprobs",))[0]["logprobs"], logprobs)  # the attention is still ours


def test_a_frozen_vision_tower_keeps_its_weights_and_the_rest_its_gradients(path, batch, tmp_path):
    full_trainer, trainer = trainer_of(path), trainer_of(path, freeze_vision=True, ema_decay=0.5)
    vision = set(vision_parameters(trainer.module))
    assert vision == {n for n, _ in trainer.module.named_parameters() if n.startswith("model.visual.")}
    first = {name: p.detach().clone() for name, p in trainer.module.named_parameters()}
    for instance in (full_trainer, trainer):
        instance.accumulate([batch], NllLoss(), {}, {})
    gradients = full_trainer.gradients()
    assert set(trainer.gradients()) == set(gradients) - vision
    for name, gradient in trainer.gradients().items():
        torch.testing.assert_close(gradient, gradients[name], atol=1e-6, rtol=0)
    trainer.apply()
    differences = {name for name, p in trainer.module.named_parameters() if not torch.equal(p, first[name])}
    assert differences
    assert not differences & vision
    assert {n.split(".")[0] for n, _ in trainer.weights("ema")} == {
        n.split(".")[0] for n, _ in trainer.weights()
    }  # whole
    trainer.save(tmp_path / "checkpoint")
    other = trainer_of(path, freeze_vision=True, ema_decay=0.5)
    other.load(tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trainer.weights(), other.weights(), strict=True))


@pytest.mark.parametrize("vision", [False, pytest.param(True, marks=pytest.mark.full)])
def test_adapters_are_in_the_text_part_unless_asked(path, batch, vision):
    trainer = trainer_of(path, lora={"rank": 2, "vision": vision})
    vision_layers = [name for name, _ in adapted(trainer.module) if name.startswith(vision_prefixes(trainer.module))]
    assert bool(vision_layers) is vision
    assert len(adapted(trainer.module)) - len(vision_layers) == 2 * 7
    base_logprobs = trainer.forward([batch], ("logprobs",), "base")[0]["logprobs"]
    trainer.update([batch], NllLoss(), {}, {})
    assert all(is_adapter(name) for name in trainer.parameters)
    assert torch.equal(trainer.forward([batch], ("logprobs",), "base")[0]["logprobs"], base_logprobs)
    assert not torch.equal(trainer.forward([batch], ("logprobs",))[0]["logprobs"], base_logprobs)


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"dtype": "bf16"}, {"storage": "bf16", "dtype": "bf16"}]
)
def test_gradients_with_recomputed_layers_and_in_bf16(path, batch, options):
    plain, trainer = trainer_of(path), trainer_of(path, options=options)
    for instance in (plain, trainer):
        instance.accumulate([batch], NllLoss(), {}, {})
    want, gradients = plain.gradients(), trainer.gradients()
    error = sum(float((gradients[n].float() - want[n]).square().sum()) for n in want) ** 0.5
    size = sum(float(g.square().sum()) for g in want.values()) ** 0.5
    assert error / size < (1e-5 if "dtype" not in options else 0.05)  # bf16 has 8 bits


def test_wrong_placeholders_name_their_sequence(path, batch):
    images = list(batch.images_B)
    images[3] = images[0]  # another number of features
    with pytest.raises(
        TrainingError, match="sequence 3 of a micro-batch has 5 placeholder tokens, which do not fit its 1 images"
    ):
        trainer_of(path).forward([replace(batch, images_B=tuple(images))], ("logprobs",))
    images[3] = tuple(replace(image, data=b"no image") for image in images[0])
    with pytest.raises(TrainingError, match="an image of 8 bytes cannot be read"):
        trainer_of(path).forward([replace(batch, images_B=tuple(images))], ("logprobs",))


def test_what_reads_no_images_is_refused(path, batch, tmp_path):
    text = tiny_model(tmp_path / "text", chars="ab")
    config = TorchTrainerConfig(device="cpu")
    with pytest.raises(
        ModelError, match=r"the data have images, but the model .* is a Qwen3ForCausalLM, which reads text"
    ):
        TorchTrainer(config, spec_of(text))
    with pytest.raises(ConfigError, match=r"trainer.freeze_vision: Qwen3ForCausalLM .* has no vision tower"):
        TorchTrainer(config.model_copy(update={"freeze_vision": True}), spec_of(text, images=False))
    with pytest.raises(ConfigError, match=r"trainer.lora.vision: Qwen3ForCausalLM .* has no vision tower"):
        trainer_of(text, options={"images": False}, lora={"rank": 2, "vision": True})
    with pytest.raises(ValueError, match="freeze_vision has no effect with lora"):
        TorchTrainerConfig(freeze_vision=True, lora={"rank": 2})
    with pytest.raises(ConfigError, match="kernels = 'liger' has not been verified for image-text models"):
        trainer_of(path, kernels="liger")
    trainer = trainer_of(text, options={"images": False})
    with pytest.raises(TrainingError, match="a batch has images, but Qwen3ForCausalLM reads text only"):
        trainer.forward([batch], ("logprobs",))
    generator = TransformersGenerator(None, GeneratorSpec((1,), trainer.tokenizer.decode))
    generator.load(trainer, 0)
    with pytest.raises(ModelError, match="request 0 has images, but Qwen3ForCausalLM reads text only"):
        list(generator.generate([GenerationRequest([3, 4], 0, Sampling(4), batch.images_B[0])]))


@pytest.mark.full
def test_a_folder_without_a_processor_trains_on_text_only(path, batch, tmp_path):
    for file in path.iterdir():
        if "processor" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    trainer = trainer_of(tmp_path, options={"images": False})
    trainer.forward([batch.select([1])], ("logprobs",))
    with pytest.raises(TrainingError, match="has no image processor"):
        trainer.forward([batch.select([0])], ("logprobs",))
    with pytest.raises(
        ModelError, match=r"the data have images, but Qwen2_5_VLForConditionalGeneration .* has no proc"
    ):
        trainer_of(tmp_path)


TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 90}
NOT_CAUSAL = r"cannot be computed with images here, causally and packed .*mask lets an image token attend to later ones"


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("gemma3", {"text_config": TEXT}, NOT_CAUSAL),
        ("gemma4", {"text_config": {**TEXT, "use_bidirectional_attention": "vision"}}, NOT_CAUSAL),
        ("gemma4", {"text_config": TEXT}, None),
        ("paligemma", {"text_config": {"model_type": "gemma", **TEXT}}, NOT_CAUSAL),
        ("mllama", {}, "its class has no get_image_features"),
        ("kosmos-2", {}, "its config names no image_token_id"),
        ("llava", {}, None),
    ],
)
def test_models_whose_config_tells_that_images_are_not_computed_are_refused_before_they_are_loaded(
    tmp_path, family, fields, reason
):
    """The folder has a config only."""
    AutoConfig.for_model(family, **fields).save_pretrained(tmp_path)
    config = TorchTrainerConfig(device="cpu")
    with pytest.raises(ModelError, match="use a decoder-only") if family == "kosmos-2" else nullcontext():
        TorchTrainer.check(config, spec_of(tmp_path, images=False), None)
    with pytest.raises(ModelError, match=f"the data have images, but .*{reason}") if reason else nullcontext():
        TorchTrainer.check(config, spec_of(tmp_path), None)


OPT = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
T5 = {"model_type": "t5", "d_model": 64, "d_ff": 64, "num_layers": 2, "num_heads": 2}
BART = {
    "model_type": "bart",
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}


@pytest.mark.parametrize(
    ("family", "text", "images", "reason"),
    [
        ("blip-2", OPT, True, "does not consist of a body and one linear language-model head"),
        ("blip-2", T5, False, "has an encoder and a decoder of text"),
        ("florence2", BART, True, "has an encoder and a decoder of text"),
    ],
)
def test_models_that_are_no_decoder_with_a_head_are_refused_before_they_are_loaded(
    tmp_path, family, text, images, reason
):
    """Transformers builds the class on the meta device. The folder has a config only."""
    AutoConfig.for_model(family, text_config=text, image_token_id=5).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"ForConditionalGeneration .* {reason}.*; use a decoder-only architecture"):
        TorchTrainer.check(TorchTrainerConfig(device="cpu"), spec_of(tmp_path, images=images), None)


@pytest.mark.full
def test_a_model_whose_image_tokens_attend_in_both_directions_is_refused(tmp_path, monkeypatch):
    path = tiny_gemma3(tmp_path, monkeypatch)
    trainer = trainer_of(path, options={"images": False})
    assert "tokens get different hidden states" in trainer.loaded_model.no_images
    with pytest.raises(
        ModelError, match=r"cannot be computed with images here, causally and packed .* such as Gemma 3"
    ):
        trainer_of(path)


def tiny_gemma3(path, monkeypatch):
    image, begin, end = "<image_soft_token>", "<start_of_image>", "<end_of_image>"

    def fields(text, ids):
        tokens = {"image_token_index": ids[image], "boi_token_index": ids[begin], "eoi_token_index": ids[end]}
        vision = {"model_type": "siglip_vision_model", **image_models._siglip(ids)}
        return {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4, **tokens}

    pixels = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 4, "image_processor": pixels}
    monkeypatch.setitem(image_models.FAMILIES, "gemma3", ((image, begin, end), fields, processor, begin))
    tiny_image_model(path, "gemma3")
    file = path / "tokenizer_config.json"
    special = {"boi_token": begin, "eoi_token": end, "image_token": image}
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": special}))
    return path
