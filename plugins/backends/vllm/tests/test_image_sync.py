"""The proof of a sync of an image-text model: a wrong vision tower in the engine fails the canary with an image."""

from __future__ import annotations

import pytest
import torch
from rlhf.errors import SyncError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf.weights.bucket import Bucket
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.image_models import tiny_image_model

from tests.support.image_batches import image_batch
from tests.support.losses import NllLoss

FAMILIES = {
    "qwen2_5_vl": "visual.blocks.{}.mlp.up_proj.weight",
    "qwen3_vl": "model.visual.blocks.{}.mlp.linear_fc1.weight",
    "idefics3": "model.vision_model.encoder.layers.{}.mlp.fc1.weight",
}
"""A tensor of each of the two layers of the vision tower."""
TOLERANCE = 2e-5
"""Of log-probs: fp32 sums in another order."""


class Setup:
    """A trained image-text model, its engine, and the syncs of a run with images and of a run of text."""

    def __init__(self, engines, path, family):
        self.layers = [FAMILIES[family].format(layer) for layer in range(2)]
        spec = ModelSpec(RoleSpec("policy", trained=True), str(path), "fp32", images=True)
        options = TorchTrainerConfig(lr=0.01, device="cpu")
        self.role = Role(spec, LocalLauncher(None).launch_trainer(TorchTrainer, options, spec), 1000)
        batch = image_batch(path, family)
        for _ in range(2):
            self.role.group.worker.update([batch], NllLoss(), {}, {})
        config = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=16)
        self.engine = VllmGenerator(config, engines.spec(path, max_images=1))
        self.images = ImageTokens(str(path))

    def push(self, version, images=True):
        canary_images = self.images if images else None
        return WeightSync(self.role, self.engine, SyncSection(), 0, print, 256, canary_images).push(version)[
            "sync/canary"
        ]


@pytest.fixture(
    scope="module",
    params=["qwen2_5_vl", *(pytest.param(f, marks=pytest.mark.full) for f in ("qwen3_vl", "idefics3"))],
)
def setup(request, engines, tmp_path_factory):
    path = tiny_image_model(tmp_path_factory.mktemp(request.param) / "model", request.param)
    instance = Setup(engines, path, request.param)
    yield instance
    instance.engine.close()


def refused(setup):
    """The message of a sync with an image, where one of text passes and finds nothing."""
    assert setup.push(2, images=False) < TOLERANCE
    with pytest.raises(SyncError, match="log-probs of the canary with an image differ") as raised:
        setup.push(2)
    return str(raised.value)


def test_a_tower_that_is_changed_after_the_load_fails_the_canary_with_an_image(setup, monkeypatch):
    from rlhf_plugin_vllm.worker import reload  # imports vLLM, which takes seconds: not where tests are only collected

    assert setup.push(1) < TOLERANCE
    end = reload.Reload.end

    @torch.no_grad()
    def negate(self):
        missing = end(self)
        norms = (".0.norm1.weight", ".0.layer_norm1.weight")
        [norm] = [weight for name, weight in self.model.named_parameters() if name.endswith(norms)]
        norm.neg_()
        return missing

    with monkeypatch.context() as patched:
        patched.setattr(reload.Reload, "end", negate)
        assert "norm1.weight." in refused(setup)
    assert setup.push(2) < TOLERANCE


def test_tensors_of_the_tower_in_each_others_place_fail_the_canary_with_an_image(setup, monkeypatch):
    """All tensors arrive and are fingerprinted, and the kernels multiply with others."""
    from rlhf_plugin_vllm.worker import reload

    first, second = setup.layers
    load = reload.Reload.take

    def take(self, bucket):
        tensors = dict(bucket.tensors)
        tensors[first], tensors[second] = tensors[second], tensors[first]
        load(self, Bucket(tuple(tensors.items()), bucket.fingerprints))
        self.received |= bucket.received()

    with monkeypatch.context() as patched:
        patched.setattr(reload.Reload, "take", take)
        assert f"Stale in the generator: {first}, {second}." in refused(setup)
    assert setup.push(2) < TOLERANCE


def test_every_image_canary_is_computed_with_the_weights_of_its_sync(setup):
    """Also where the same version, and so the same image, is sent again with other weights."""
    setup.push(1)
    for parameter in setup.role.group.worker.loaded_model.module.parameters():
        parameter.data.mul_(1.05)
    assert setup.push(1) < TOLERANCE
