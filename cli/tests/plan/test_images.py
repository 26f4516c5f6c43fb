"""The vision tower in a plan: what its layers keep, how many patches a micro-batch has, and where that is counted."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.memory import SamplingWork, TrainerWork
from rlhf.types import RoleSpec
from rlhf_cli.plan.model_size import read_size
from rlhf_modeling.activations import Arithmetic, activations, casts, recomputed, widest_working
from rlhf_modeling.adapters import LoraOptions
from rlhf_modeling.arithmetic import arithmetic
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.images import memory
from rlhf_modeling.memory import trainer_memory
from rlhf_modeling.model import load_model
from rlhf_modeling.storage import Storage
from rlhf_testing.image_models import drawing, tiny_image_model

from tests.support.image_batches import sequence
from tests.support.saved_tensors import saved_bytes

TOLERANCE = 0.2
"""One number of hidden widths stands for all classes; see ``memory.KEPT_WIDTHS``."""
IMAGES = 5
WIDE = {"hidden_size": 96, "intermediate_size": 256}
DEPTH = {"qwen2_5_vl": "depth", "qwen3_vl": "depth", "idefics3": "num_hidden_layers", "llava": "num_hidden_layers"}
HEADS = {family: "num_heads" if depth == "depth" else "num_attention_heads" for family, depth in DEPTH.items()}


def measured_bytes(path: str, family: str, bf16: bool) -> int:
    """Bytes of all distinct storages that :data:`IMAGES` sequences with an image keep, without weights."""
    model = load_model(ModelSpec(RoleSpec("policy", "lm", True), path, "fp32", images=True), torch.device("cpu"))
    ids, images = sequence(path, family, ("ab", drawing(64, 64), "cd"))
    ids_N, position_N = torch.tensor(ids * IMAGES), torch.arange(len(ids)).repeat(IMAGES)
    forward = partial(model.hidden, ids_N, position_N, [len(ids)] * IMAGES, [images] * IMAGES)
    return saved_bytes(model.module, forward, bf16=bf16)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("family", "bf16"),
    [
        ("qwen3_vl", False),
        *(pytest.param(family, bf16, marks=FULL) for family in DEPTH for bf16 in (False, True))
    ],
)  # fmt: skip
def test_a_layer_of_the_tower_keeps_what_the_formula_states(tmp_path, family, bf16):
    paths = []
    for depth in (2, 3):
        vision = {**WIDE, DEPTH[family]: depth, HEADS[family]: 3}
        paths.append(str(tiny_image_model(tmp_path / str(depth), family, vision=vision)))
    tower = read_size(paths[1], images=True).tower
    assert (tower.layers, tower.hidden, tower.ffn, tower.gated) == (3, 96, 256, family == "qwen2_5_vl")
    two, three = (measured_bytes(path, family, bf16) for path in paths)
    patches = IMAGES * tower.patches  # an image of 64 x 64 pixels is as large as the processor allows
    assert memory.tower_saved(tower, Arithmetic(bf16=bf16)) == pytest.approx((three - two) / patches, rel=TOLERANCE)


@pytest.fixture(scope="module")
def size(tmp_path_factory):
    """An image has 64 patches and 16 tokens."""
    size = read_size(str(tiny_image_model(tmp_path_factory.mktemp("m"), "qwen3_vl")), images=True)
    assert (size.tower.patches, size.tower.tokens, size.tower.pixels) == (64, 16, 3 * 2 * 8 * 8)
    assert (size.tower.layers, size.tower.projector) == (2, 2 * (256 + 256 + 256 + 64))
    return size


def test_a_micro_batch_has_as_many_images_as_its_sequences_may(size):
    tower = size.tower
    assert memory.image_tokens(tower, 1, 64, 512) == 8 * 16
    assert memory.image_tokens(tower, 3, 64, 512) == 8 * 48
    assert memory.image_tokens(tower, 9, 64, 512) == 512, "a sequence has no further tokens"
    assert memory.image_tokens(tower, 0, 64, 512) == memory.image_tokens(None, 3, 64, 512) == 0
    assert memory.patches(tower, Arithmetic(image_tokens=128)) == 8 * 64
    work = TrainerWork(longest=64, unit=64, units=64, micro_tokens=512, images=1, siblings=4)
    assert memory.kept_pixels(tower, work, 2) == 64 // 4 // 2 * 64 * 384 * 4
    assert memory.kept_pixels(tower, replace(work, units=10**6), 2) == 2**30


def planned(size, device="cuda", head="lm", trained=True, checkpointing=False, images=1, **options):
    work = TrainerWork(longest=64, unit=64, units=64, micro_tokens=512, images=images)
    spec = ModelSpec(RoleSpec("policy", head, trained), "", "fp32", checkpointing, images=True)
    config = TrainingConfig(**options)
    a = arithmetic(config, spec, size, work, device)
    return a, trainer_memory(Storage(), a, config, spec, size, work).phases


def test_the_tower_is_counted_where_it_is_trained(size):
    a, phases = planned(size)
    text = activations(size, a)
    per_patch = 2 * 4 * (10 * 64 + 2 * 64) + 4 * 384
    assert phases["train"].device["activations"] == text + 512 * per_patch + 128 * 4 * size.tower.projector
    for options in ({"freeze_vision": True}, {"lora": LoraOptions(rank=2)}):
        a, phases = planned(size, **options)
        assert phases["train"].device["activations"] == activations(size, a)
    a, phases = planned(size, lora=LoraOptions(rank=2, vision=True))
    assert phases["train"].device["activations"] > activations(size, a)
    a, phases = planned(size, checkpointing=True)
    expected = 512 * (2 * 4 * 64 + 4 * 384) + 128 * 4 * size.tower.projector
    assert memory.tower_activations(size, a) == expected
    assert phases["train"].device["activations"] == activations(size, a) + expected + recomputed(size, a)
    assert memory.recomputed_tower(size, a) == 512 * 4 * (10 * 64 + 2 * 64)


def test_the_weights_of_the_tower_are_cast_where_it_is_computed(size):
    a = Arithmetic(bf16=True, casts=True)
    assert casts(size, a) - casts(replace(size, tower=None), a) == 2 * size.vision > 0


def test_pixels_are_in_host_memory(size):
    (_, gpu), (_, cpu), (_, none) = (
        planned(size, device, images=n) for device, n in (("cuda", 1), ("cpu", 1), ("cpu", 0))
    )
    pixels = 64 * 64 * 384 * 4
    assert gpu["rest"].host == pixels
    assert cpu["rest"].host == 0
    assert cpu["rest"].device["working"] == pixels
    assert "working" not in none["rest"].device


def test_prompts_with_images_need_the_temporaries_of_the_tower(size):
    work, a = SamplingWork(8, 8, 64, 32, images=1), Arithmetic(256, 64, device="cuda")
    with_images = replace(a, image_tokens=8 * 16)
    assert memory.prompts_working(size, work, a) == memory.tower_working(size, with_images) > widest_working(size, a)
    assert memory.prompts_working(size, replace(work, images=0), a) == widest_working(size, a)


def test_a_folder_without_a_processor_is_refused_as_the_run_refuses_it(tmp_path):
    path = tiny_image_model(tmp_path, "llava")
    (path / "processor_config.json").unlink()
    assert read_size(str(path)).tower is None
    with pytest.raises(ModelError, match=r"cannot load the processor of .* preprocessor_config.json"):
        read_size(str(path), images=True)
