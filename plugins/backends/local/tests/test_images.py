"""The trainer computes image-text models as transformers does for one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_modeling.images.architecture import vision_parameters
from rlhf_modeling.images.pixels import joined
from rlhf_modeling.shared_prefixes import share_prefixes
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_testing.image_models import drawing, tiny_image_model

from tests.support.image_batches import BLUE, RED, SEQUENCES, SMALL, PlainImageModel, image_batch, sequence
from tests.support.losses import NllLoss

TOLERANCE = 1e-5
"""Only the order of sums differs in fp32."""
FAMILIES = [
    "qwen3_vl",
    pytest.param("qwen2_5_vl", marks=pytest.mark.full),
    pytest.param("idefics3", marks=pytest.mark.full),
    pytest.param("llava", marks=pytest.mark.full),
    "internvl",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Makes and keeps a model of each family."""
    paths = {}

    def path_of(family="qwen3_vl"):
        if family not in paths:
            paths[family] = tiny_image_model(tmp_path_factory.mktemp(family), family)
        return paths[family]

    return path_of


def trainer_of(path, head="lm", images=True, **options):
    spec = ModelSpec(RoleSpec("policy", head, True), str(path), dtype="fp32", seed=3, total_updates=5, images=images)
    return TorchTrainer(TorchTrainerConfig(device="cpu", lr=1e-3, **options), spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_each_sequence_alone(folder, family):
    path = folder(family)
    plain, trainer, batch = PlainImageModel(path, family), trainer_of(path), image_batch(path, family)
    want = [plain.logprobs(parts) for parts in SEQUENCES]
    mask_N = batch.tok["loss_mask"]
    assert [len(x) for x in want] == batch.lens_B.tolist()  # our tokens are the processor's
    split = [[5, 0, 2], [1], [4, 6, 3]]  # micro-batches of another split, in another order
    for units in ([list(range(7))], split):
        micros = [batch.select(u) for u in units]
        for indices, outputs in zip(units, trainer.forward(micros, ("logprobs",)), strict=True):
            own_N = torch.cat([want[u] for u in indices]) * torch.cat(
                [mask_N.split(batch.lens_B.tolist())[u] for u in indices]
            )
            torch.testing.assert_close(outputs["logprobs"], own_N.detach(), atol=TOLERANCE, rtol=0)
        trainer.accumulate(micros, NllLoss(), {}, {})
        gradients = trainer.gradients()
        trainer.zero_grad()
        loss = -(torch.cat(want) * mask_N).sum() / mask_N.sum()
        plain.model.zero_grad()
        loss.backward(retain_graph=True)
        for name, parameter in plain.model.named_parameters():
            if name in gradients:
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(gradients[name], expected, atol=TOLERANCE, rtol=0)
    assert set(gradients) <= {name for name, _ in plain.model.named_parameters()}
    assert any(gradients[name].abs().max() > 1e-3 for name in vision_parameters(trainer.module))


def test_a_tensor_that_a_processor_leaves_out_for_some_images_is_read_from_the_others():
    """DeepSeek-OCR-2 has local views of large images only."""
    small = {"pixel_values": torch.zeros(1, 3, 2, 2), "num_local_patches": torch.tensor([0])}
    large = {"pixel_values": torch.ones(1, 3, 2, 2), "num_local_patches": torch.tensor([2]), "local": torch.ones(2, 3)}
    for images in ([small, large], [large, small]):
        arguments = joined(images, torch.device("cpu"))
        assert arguments["local"].shape == (2, 3)
        assert arguments["num_local_patches"].tolist() == [int(i["num_local_patches"]) for i in images]


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_one_pixel_and_thin_ones_are_computed_as_by_transformers(folder, family):
    """Three pixels of height are as many as colours."""
    rows = (
        ("a", drawing(1, 1), "b"),
        ("c", drawing(30, 3), "d", drawing(1, 20)),
        ("e", drawing(900, 16), "f", drawing(16, 900)),
    )
    path = folder(family)
    batch, plain = image_batch(path, family, rows), PlainImageModel(path, family)
    logprobs = trainer_of(path).forward([batch], ("logprobs",))[0]["logprobs"]
    with torch.no_grad():
        want = torch.cat([plain.logprobs(parts) for parts in rows]) * batch.tok["loss_mask"]
    torch.testing.assert_close(logprobs, want, atol=TOLERANCE, rtol=0)


def test_equal_tokens_with_other_images_share_nothing(folder):
    """The first sequences have the same tokens and other images, so a shared prefix would be wrong."""
    path = folder()
    batch = image_batch(path, "qwen3_vl").select([0, 6, 0])
    first, second, _ = batch.ids_N.split(batch.lens_B.tolist())
    assert torch.equal(first, second)
    trainer = trainer_of(path)
    logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"].split(batch.lens_B.tolist())
    assert (logprobs[0] - logprobs[1]).abs().max() > 1e-3
    torch.testing.assert_close(logprobs[0], logprobs[2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_images_in_prefixes_are_computed_once(folder, family, monkeypatch):
    path = folder(family)
    front = ("which colours? ", RED, SMALL, " say: ")
    variants = [("which colours? ", SMALL, RED, " say: ", "one"), ("which colours? ", RED, BLUE, " say: ", "no")]
    rows = (*((*front, answer) for answer in ("red", "blue, red", "?")), *variants, ("text",))
    plain, trainer, batch = PlainImageModel(path, family), trainer_of(path), image_batch(path, family, rows)
    assert share_prefixes(batch.ids_N, batch.lens_B.tolist(), batch.images_B) is not None
    computed = []
    body, forward = trainer.loaded_model.body, trainer.loaded_model.body.forward
    monkeypatch.setattr(body, "forward", lambda **inputs: computed.append(inputs) or forward(**inputs))
    logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"]
    assert computed[0]["input_ids"].numel() < batch.tokens
    want = torch.cat([plain.logprobs(parts) for parts in rows]) * batch.tok["loss_mask"]
    torch.testing.assert_close(logprobs, want.detach(), atol=TOLERANCE, rtol=0)
    if "image_grid_thw" in computed[0]:
        assert len(computed[0]["image_grid_thw"]) == 2 + 2 + 1  # RED is the first image of the last one too
    unshared = trainer_of(path, shared_prefixes=False)
    for instance in (trainer, unshared):
        instance.accumulate([batch], NllLoss(), {}, {})
    for name, gradient in trainer.gradients().items():
        torch.testing.assert_close(gradient, unshared.gradients()[name], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_generator_samples_from_images_with_the_trainers_logprobs(folder, family):
    """Also after a sampled placeholder of an image, which is text."""
    path = folder(family)
    trainer = trainer_of(path)
    generator = TransformersGenerator(None, GeneratorSpec(tuple(trainer.eos_token_ids), trainer.tokenizer.decode))
    generator.load(trainer, 0)
    contexts = [sequence(path, family, SEQUENCES[n]) for n in (0, 6, 2, 1, 0)]
    sampling = Sampling(12, 1.0, ignore_eos=True)
    requests = [GenerationRequest(ids, n % 4, sampling, images) for n, (ids, images) in enumerate(contexts)]
    turns = dict(generator.generate(requests))
    assert turns[0].ids == turns[4].ids
    assert turns[0].logprobs != turns[1].logprobs
    assert generator.work["prefill_tokens"] == sum(len(ids) for ids, _ in contexts[:4])
    placeholder = trainer.module.config.image_token_id
    turns[0].ids[3] = turns[2].ids[3] = placeholder  # the log-probs before it stay
    units = []
    for n, (ids, images) in enumerate(contexts[:4]):
        taught = [False] * len(ids) + [True] * 12
        units.append(UnitData([SequenceData([*ids, *turns[n].ids], {"loss_mask": taught}, images=images)]))
    batch = weigh(pack(units), NllLoss().reduce())
    logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"][batch.tok["loss_mask"]].view(4, 12)
    for n, got_T in enumerate(logprobs):
        count = 3 if n in (0, 2) else 12
        want_T = torch.tensor(turns[n].logprobs)
        torch.testing.assert_close(got_T[:count], want_T[:count], atol=TOLERANCE, rtol=0)
    continuations = [
        GenerationRequest([*ids, *turns[n].ids[:4]], 9, sampling, images)
        for n, (ids, images) in enumerate(contexts[:3])
    ]
    followed = dict(generator.generate(continuations))
    units = []
    for n, (ids, images) in enumerate(contexts[:3]):
        taught = [False] * (len(ids) + 4) + [True] * 12
        tokens = [*ids, *turns[n].ids[:4], *followed[n].ids]
        units.append(UnitData([SequenceData(tokens, {"loss_mask": taught}, images=images)]))
    batch = weigh(pack(units), NllLoss().reduce())
    logprobs = trainer.forward([batch], ("logprobs",))[0]["logprobs"][batch.tok["loss_mask"]].view(3, 12)
    want = torch.tensor([list(followed[n].logprobs) for n in range(3)])
    torch.testing.assert_close(logprobs, want, atol=TOLERANCE, rtol=0)
