"""Samples of image-text models: their log-probs are those of transformers' own model, whatever is cached."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.errors import ConfigError, ModelError
from rlhf.types import GenerationRequest, Image, Sampling
from rlhf.weights.bucket import buckets
from rlhf_hub.processors import load_processor, open_image
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_testing.image_models import FAMILIES, drawing, tiny_image_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

RED, BLUE, WIDE = drawing(), drawing(colour="blue"), drawing(48, 24, "green")
TOLERANCE = 2e-5
"""Of log-probs: fp32 sums in another order. Qwen3-VL differs most, by about 5e-6."""


class Setup:
    """A tiny model, its engine with room for two images, and transformers' model and processor."""

    def __init__(self, path, family):
        self.path, self.mark = path, FAMILIES[family][3]
        self.processor = load_processor(str(path))
        self.model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()

    def start(self, engines, **options):
        config = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=16, **options)
        self.generator = VllmGenerator(config, engines.spec(self.path, max_images=2))
        return self.generator

    def processed(self, parts):
        """The processor's tokens and pixels of texts (str) and images (bytes), one after another."""
        pictures = [open_image(part) for part in parts if isinstance(part, bytes)]
        text = "".join(self.mark if isinstance(part, bytes) else part for part in parts)
        nested = [pictures] if "idefics" in type(self.processor).__name__.lower() else pictures
        return self.processor(text=[text], images=nested if pictures else None, return_tensors="pt")

    def request(self, *parts, seed=0, count=6):
        ids, images = [], []
        for part in parts:
            tokens = self.processed([part])["input_ids"][0].tolist()
            if isinstance(part, bytes):
                short = self.processor.tokenizer(self.mark, add_special_tokens=False).input_ids
                images.append(Image(part, len(ids), len(tokens), short))
            ids += tokens
        assert ids == self.processed(parts)["input_ids"][0].tolist()
        return GenerationRequest(ids, seed, Sampling(max_new_tokens=count, ignore_eos=True), tuple(images))

    def apart(self, turn, *parts):
        """Largest difference of a sampled token's log-prob, engine against transformers."""
        inputs = dict(self.processed(parts))
        continuation = torch.tensor([list(turn.ids)])
        start = inputs["input_ids"].shape[1]
        for name, filler in (
            ("input_ids", continuation),
            ("attention_mask", continuation * 0 + 1),
            ("mm_token_type_ids", continuation * 0),
        ):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], filler], 1)
        with torch.no_grad():
            rows = self.model(**inputs).logits[0, start - 1 : -1].log_softmax(-1)
        return float((rows.gather(1, continuation.T)[:, 0] - torch.tensor(turn.logprobs)).abs().max())

    def load(self, version, change=None):
        """Send the file's weights to the engine, or those that ``change(name, tensor)`` returns, also to the model."""
        weights = load_file(self.path / "model.safetensors")
        if change is not None:
            weights = {name: change(name, tensor) for name, tensor in weights.items()}
            self.model.load_state_dict(self.renamed(weights), strict=False)
        self.generator.begin_load(version)
        for bucket in buckets(weights.items(), 2**14, {}):
            self.generator.take(bucket)
        assert all(proof.received.keys() == weights.keys() for proof in self.generator.end_load())

    def renamed(self, weights):
        """Under transformers' names of a loaded model."""
        folder = self.path.parent / "changed"
        folder.mkdir(exist_ok=True)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text((self.path / "config.json").read_text())
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()

    def sample(self, *requests):
        return [turn for _, turn in sorted(self.generator.generate(requests), key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def qwen(engines, tmp_path_factory):
    instance = Setup(tiny_image_model(tmp_path_factory.mktemp("qwen") / "model"), "qwen2_5_vl")
    instance.start(engines)
    instance.load(0)
    yield instance
    instance.generator.close()


PROMPTS = (
    ("ab", RED, "cd"),
    ("ab", BLUE, "cd"),  # equal tokens, another image
    (RED, "x", RED, "y"),  # the same image twice
    (WIDE, "and ", BLUE),
    (drawing(1, 1), "small and thin", drawing(900, 16)),
    ("only text",),
)


def test_samples_have_the_log_probs_of_transformers(qwen):
    turns = qwen.sample(*(qwen.request(*parts, seed=n) for n, parts in enumerate(PROMPTS)))
    assert max(qwen.apart(turn, *parts) for turn, parts in zip(turns, PROMPTS, strict=True)) < TOLERANCE
    second = qwen.sample(*(qwen.request(*parts, seed=n) for n, parts in enumerate(PROMPTS)))
    assert [turn.ids for turn in second] == [turn.ids for turn in turns]


def test_prefixes_are_shared_by_the_content_of_images(qwen):
    """Both prompts have the same tokens in their first cache blocks, of 128 tokens on a CPU."""
    text = "z" * 150
    for image in (RED, BLUE, RED):
        [turn] = qwen.sample(qwen.request(image, text))
        assert qwen.apart(turn, image, text) < TOLERANCE


def test_new_weights_of_the_part_that_reads_images_are_used_at_once(qwen):
    qwen.sample(qwen.request(RED, "q"))  # its features are cached
    qwen.load(1, lambda name, tensor: tensor + 0.3 if "merger" in name else tensor)
    [turn] = qwen.sample(qwen.request(RED, "q"))
    assert qwen.apart(turn, RED, "q") < TOLERANCE


def sampled_on_new_weights(setup, *parts):
    """The sample of a request whose image is in a cached block, with a load of equal weights after its first token."""
    setup.load(2, lambda name, tensor: tensor * 1.1)
    request = setup.request(*parts)
    [uninterrupted] = setup.sample(request)
    assert setup.generator.advance({0: request}) == []
    setup.load(3, lambda name, tensor: tensor * 1.1)
    [(_, turn)] = setup.generator.advance({}, seconds=60)
    assert turn.ids == uninterrupted.ids
    assert [version for _, version in turn.versions] == [2, 3]
    return turn


def test_unfinished_samples_read_their_images_again_after_a_load(qwen):
    parts = RED, "z" * 150
    assert qwen.apart(sampled_on_new_weights(qwen, *parts), *parts) < TOLERANCE


def test_a_sampled_token_of_an_image_is_no_image(qwen):
    """As in a conversation in which the policy wrote such a token before the next image was shown."""
    request, image = qwen.request("ab", RED, "cd"), qwen.model.config.image_token_id
    ids = [image, *request.ids]
    [turn] = qwen.sample(replace(request, ids=ids, images=(request.images[0].moved(1),)))
    assert len(turn.ids) == 6


def test_other_tokens_than_vllm_makes_are_refused(qwen):
    request = qwen.request("ab", RED, "cd")
    image = request.images[0]
    tokens = list(request.ids[image.start : image.start + image.tokens])
    expanded_twice = replace(request, images=(Image(image.data, image.start, image.tokens, tokens),))
    with pytest.raises(
        ModelError, match=r"vLLM expands image 0 of a request to \d+ tokens .*, but the run has 6 tokens"
    ):
        qwen.sample(expanded_twice)
    assert len(qwen.sample(request)) == 1


def test_more_images_than_the_engine_was_started_for_are_refused(qwen):
    with pytest.raises(ConfigError, match=r"request 0 has 3 images, but the engine was started for 2. Raise data.max"):
        qwen.sample(qwen.request(RED, RED, RED))


def as_published(path):
    """Published checkpoints of LLaVA have these names of weights; transformers saves a new model under others."""
    weights = load_file(path / "model.safetensors")
    checkpoint = {name.replace("vision_tower.", "vision_tower.vision_model."): weights[name] for name in weights}
    save_file(checkpoint, path / "model.safetensors", metadata={"format": "pt"})


def test_a_slept_engine_samples_from_images_as_before(qwen):
    """On a CPU sleep gives no memory back, but keys, values and features of images are dropped and computed again."""
    requests = [qwen.request(*parts, seed=n) for n, parts in enumerate(PROMPTS)]
    old_turns = qwen.sample(*requests)
    qwen.generator.sleep()
    qwen.generator.wake()
    turns = qwen.sample(*requests)
    assert [turn.ids for turn in turns] == [turn.ids for turn in old_turns]
    assert max(qwen.apart(turn, *parts) for turn, parts in zip(turns, PROMPTS, strict=True)) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3", "llava"])
def test_other_families(engines, tmp_path, family):
    instance = Setup(tiny_image_model(tmp_path / "model", family), family)
    if family == "llava":
        as_published(instance.path)
    generator = instance.start(engines)
    try:
        instance.load(0, lambda name, tensor: tensor * 1.1)
        turns = instance.sample(*(instance.request(*parts, seed=n) for n, parts in enumerate(PROMPTS)))
        assert max(instance.apart(turn, *parts) for turn, parts in zip(turns, PROMPTS, strict=True)) < TOLERANCE
        parts = RED, "z" * 150
        assert instance.apart(sampled_on_new_weights(instance, *parts), *parts) < TOLERANCE
    finally:
        generator.close()


@pytest.mark.full
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "internvl"])  # in vLLM that needs torchvision
def test_a_run_without_images_loads_the_text_part_only(engines, tmp_path, family):
    instance = Setup(tiny_image_model(tmp_path / "model", family), family)
    if family == "llava":
        as_published(instance.path)
    generator = instance.generator = VllmGenerator(engines.small, engines.spec(instance.path))
    try:
        instance.load(0, lambda name, tensor: tensor * 1.1)
        [turn] = instance.sample(instance.request("only text"))
        assert instance.apart(turn, "only text") < TOLERANCE
        with pytest.raises(ConfigError, match="request 0 has 1 images, but the engine was started for 0"):
            instance.sample(instance.request(RED))
    finally:
        generator.close()


@pytest.mark.full
def test_two_workers(engines, tmp_path):
    instance = Setup(tiny_image_model(tmp_path / "model", num_key_value_heads=2), "qwen2_5_vl")
    generator = instance.start(engines, tensor_parallel=2)
    try:
        instance.load(0, lambda name, tensor: tensor * 1.1)
        turns = instance.sample(*(instance.request(*parts, seed=n) for n, parts in enumerate(PROMPTS)))
        assert max(instance.apart(turn, *parts) for turn, parts in zip(turns, PROMPTS, strict=True)) < TOLERANCE
    finally:
        generator.close()
