"""An engine restores its process and prints nothing; a compiled model takes new weights."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.types import RoleSpec
from rlhf_plugin_vllm.config import VllmGeneratorConfig
from rlhf_plugin_vllm.generator import VllmGenerator
from rlhf_testing.models import model_path
from rlhf_testing.plain import PlainTrainer

from plugins.backends.vllm.tests.engine_calls import difference, load, sample

pytestmark = pytest.mark.full

GUEST = """
import json, os, random, sys
import numpy, psutil, torch
from transformers import AutoModelForCausalLM  # imported before, as where a trainer shares the process
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.weights.bucket import buckets
from rlhf.types import GenerationRequest, Sampling
from rlhf_plugin_vllm.generator import VllmGenerator

def traces():
    told = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "TORCHINDUCTOR_", "TRITON_"))}
    draws = (str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist())
    products = torch.get_float32_matmul_precision()
    return told, draws, products, torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()

path = sys.argv[1]
weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
torch.set_num_threads(2)
torch.set_float32_matmul_precision("high")
sys.stderr.write("BEGIN\\n")
before = traces()
spec = GeneratorSpec((1,), str, path, "fp32", max_tokens=64)
generator = VllmGenerator(VllmGenerator.Config(kv_cache_gib=0.0625), spec)
assert traces() == before, "started"
generator.begin_load(0)
for bucket in buckets(weights.items(), 2**20, {}):
    generator.take(bucket)
generator.end_load()
turns = list(generator.generate([GenerationRequest((20, 21), n, Sampling(8)) for n in range(4)]))
generator.logprobs([[20, 21, 22]])
assert len(turns) == 4
assert traces() == before, "sampled"
torch.set_num_threads(1)
assert torch.get_num_threads() == 1, "vLLM turned this off"
generator.close()
assert not torch.distributed.is_initialized()
assert psutil.Process().children(recursive=True) == []
sys.stderr.write("END\\n")
"""


@pytest.mark.slow
def test_the_process_is_restored_after_an_engine():
    path = str(model_path(head_dim=32))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(GUEST), path], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
    assert done.stderr.partition("BEGIN\n")[2].strip() == "END", "vLLM is quiet"


@pytest.fixture
def source():
    return PlainTrainer(
        None, ModelSpec(RoleSpec("policy"), str(model_path("llama", seed=5, head_dim=32)), dtype="fp32")
    )


@pytest.mark.slow
def test_a_compiled_model_takes_new_weights(source):
    """Compiled code keeps references to objects that it was traced with. Packed weights must not be among them."""
    path = model_path("llama", head_dim=32)
    spec = GeneratorSpec((1,), str, str(path), "fp32", max_tokens=256)
    generator = VllmGenerator(VllmGeneratorConfig(kv_cache_gib=0.0625, max_sequences=64, eager=False), spec)
    try:
        original = PlainTrainer(None, ModelSpec(RoleSpec("policy"), str(path), dtype="fp32"))
        for version, weights in enumerate((original, source, original)):
            load(generator, weights, version)
            assert difference(generator, weights) < 1e-5
            assert len(sample(generator)) == 4
    finally:
        generator.close()
