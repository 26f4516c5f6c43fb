"""A trainer's image-text model in vLLM: after a sync, and from the folder that it exports."""

from __future__ import annotations

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.ops.heads import resolve_head
from rlhf.types import RoleSpec
from rlhf_hub.processors import load_processor
from rlhf_plugin_local.launcher import LocalLauncher
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.image_models import tiny_image_model
from transformers import AutoModelForImageTextToText

from tests.support.image_batches import SEQUENCES, image_batch, sequence
from tests.support.losses import NllLoss

pytestmark = pytest.mark.full

LORA = {"lora": {"rank": 4}}
CASES = {"qwen2_5_vl": {}, "qwen3_vl": LORA, "idefics3": {}}
TOLERANCE = 2e-5
"""Of log-probs: fp32 sums in another order."""


def engine_for(engines, path):
    config = VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=16)
    return VllmGenerator(config, engines.spec(path, max_images=2))


@pytest.mark.parametrize("family", CASES)
def test_vllm_computes_the_trainers_log_probs(engines, tmp_path, family):
    path = tiny_image_model(tmp_path / "model", family)
    spec = ModelSpec(RoleSpec("policy", trained=True), str(path), "fp32", images=True)
    options = TorchTrainerConfig(lr=0.01, device="cpu", **CASES[family])
    role = Role(spec, LocalLauncher(None).launch_trainer(TorchTrainer, options, spec), 1000)
    batch = image_batch(path, family)
    sequences = [sequence(path, family, parts) for parts in SEQUENCES]

    def trainers():
        flat = role.forward(batch, [resolve_head("logprobs", None)])["logprobs"]
        return [part[1:] for part in flat.split(batch.lens_B.tolist())]

    def difference(engine):
        """Of tokens of text: a trainer computes no others."""
        [scored] = engine.logprobs([ids for ids, _ in sequences], [images for _, images in sequences])
        pairs = zip(scored, trainers(), strict=True)
        return max(float((torch.tensor(scores) - expected).abs()[expected != 0].max()) for scores, expected in pairs)

    first = trainers()
    for _ in range(3):
        role.group.worker.update([batch], NllLoss(), {}, {})
    assert max(float((a - b).abs().max()) for a, b in zip(first, trainers(), strict=True)) > 0.1
    engine = engine_for(engines, path)
    try:
        WeightSync(role, engine, SyncSection(), 0, print).push(1)
        assert difference(engine) < TOLERANCE
    finally:
        engine.close()
    role.group.worker.export(tmp_path / "export")
    assert load_processor(str(tmp_path / "export")).image_processor is not None
    AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    from_export = engine_for(engines, tmp_path / "export")
    try:
        from_export._not_ready = ""  # the weights that it read itself
        assert difference(from_export) < TOLERANCE
    finally:
        from_export.close()
