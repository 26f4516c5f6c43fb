"""Mixtures of experts: vLLM loads every tensor that a trainer sends, and notices a missing one.

On a CPU the plugin refuses mixtures of experts, because vLLM's kernels keep the old experts after a reload. These tests
skip that check: they test names and completeness, not samples. The engines run in a process of their own, because vLLM
makes its process groups with the first engine of a process, and a dense model's groups have none for experts.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from rlhf.errors import SyncError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf.weights.bucket import buckets
from rlhf_plugin_local.trainer import TorchTrainer, TorchTrainerConfig
from rlhf_plugin_vllm.engine import engine
from rlhf_testing.models import model_path
from safetensors.torch import load_file

pytestmark = pytest.mark.full

SIZES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
EXPERT = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.up_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w3.weight",
}


def take(generator, weights, version):
    generator.begin_load(version)
    for bucket in buckets(weights.items(), 2**14, {}):
        generator.take(bucket)
    return generator.end_load()


def load_whole_and_without_an_expert(architecture):
    from conftest import Engines

    path = model_path(architecture, head_dim=32, tied=False, **SIZES[architecture])
    engine._check_cpu_model = lambda model: None
    engines = Engines()
    generator = engines.get(path)
    spec = ModelSpec(RoleSpec("policy"), str(path), dtype="fp32")
    weights = dict(TorchTrainer(TorchTrainerConfig(device="cpu"), spec).weights())
    assert weights.keys() == load_file(path / "model.safetensors").keys()
    [proof] = take(generator, weights, 1)
    assert proof.received.keys() == weights.keys()
    partial = {name: tensor for name, tensor in weights.items() if name != EXPERT[architecture]}
    assert len(partial) < len(weights)
    with pytest.raises(SyncError, match=r"did not receive all weights of version 2: a part of .*layers\.1\..*experts"):
        take(generator, partial, 2)
    take(generator, weights, 3)
    engines.close()


@pytest.mark.slow
def test_all_experts_that_a_trainer_sends_are_loaded():
    command = [sys.executable, __file__, *SIZES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line in SIZES] == list(SIZES)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        load_whole_and_without_an_expert(name)
        print(name)
