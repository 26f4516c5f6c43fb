"""The estimates of `rlhf plan` are within 25 % of the memory of processes with 100 M parameters on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.plan.from_run_file import layout_of, planned_run
from rlhf_cli.plan.layout import Machine
from rlhf_cli.plan.phases import sum_of
from rlhf_runtime.config.load import load
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.tiny import tiny_model

from tests.members import ROOT
from tests.plan_memory_process import LENGTH, SAMPLES, TOKENS

pytestmark = pytest.mark.full

TOLERANCE = 0.25
MODEL = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "intermediate": 2048, "vocab_size": 32000}
CASES = {
    "train": ("train", 1, {}),
    "train adapters": ("train", 1, {"lora": {"rank": 16}}),
    "annotate": ("forward", 1, {}),
    "generate after training": ("generate", 1, {}),
    "train on images, Qwen2.5-VL": ("train", 1, {"images": "qwen2_5_vl"}),
    "train on images, LLaVA": ("train", 1, {"images": "llava"}),
    "train a text part": ("train", 1, {"images": "qwen2_5_vl", "freeze_vision": True}),
    "train on two ranks of ZeRO-2": ("train", 2, {"stage": 2}),
    "train on two ranks of ZeRO-3": ("train", 2, {"stage": 3}),
    "train on two ranks of FSDP": ("train", 2, {"use": "fsdp"}),
}


def planned(path: str, phase: str, ranks: int, options: dict[str, Any]) -> int:
    """Planned bytes of one rank in the phase, without those of the process."""
    half = str(LENGTH // 2)
    flags = {
        "algorithm.use": "grpo", "reward": "math", "data.train": "unread.jsonl", "policy.model": path,
        "policy.dtype": "fp32", "policy.micro_tokens": str(TOKENS), "data.max_tokens": str(LENGTH),
        "data.max_prompt_tokens": half, "sampling.max_new_tokens": half, "sampling.samples_per_prompt": "8",
        "data.batch_size": str(SAMPLES // 8), "trainer.shared_prefixes": "false",
    }  # fmt: skip
    role = "reference" if phase == "forward" else "policy"
    if phase == "forward":
        flags |= {"algorithm.kl.coef": "0.1", "reference.dtype": "fp32", "reference.micro_tokens": str(TOKENS)}
    if "lora" in options:
        flags["trainer.lora.rank"] = str(options["lora"]["rank"])
    if ranks > 1:
        flags |= {"launcher.use": "ray", "generator.use": "vllm", "trainer.use": "deepspeed"}
        flags |= {f"trainer.{key}": str(value) for key, value in options.items()} | {
            f"placement.{role}.ranks": str(ranks)
        }
    if "images" in options:
        flags["data.max_images"] = "1"
        flags["trainer.freeze_vision"] = str("freeze_vision" in options).lower()
    layout = layout_of(planned_run(load(None, list(flags.items())), Plugins.discover(), "cpu"), Machine("cpu", 2**40))
    phases = layout.role(role).memory.phases
    if phase == "generate":
        assert layout.engines is not None
        parts = [phases["rest"].device, layout.engines.memory.phases["generate"].device]
    else:
        parts = [phases[phase].device]
    return sum(map(sum_of, parts))


def measured(path: str, phase: str, ranks: int, options: dict[str, Any]) -> int:
    """Measured bytes of the rank that takes most."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    work = {"what": phase, "path": path, "ranks": ranks, "port": port, "options": options}
    script = str(ROOT / "tests" / "plan_memory_process.py")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path}
    children = [
        subprocess.Popen(
            [sys.executable, script, json.dumps(work | {"rank": rank})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [child.communicate() for child in children]
    assert [child.returncode for child in children] == [0] * ranks, outputs[0][1]
    return max(int(out.splitlines()[-1]) for out, _ in outputs)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "100M", std=0.02, **MODEL))


@pytest.fixture(scope="module")
def image_text(tmp_path_factory) -> dict[str, str]:
    """{family: a model with 100 M parameters}. Every image has 64 tokens: 256 patches in Qwen2.5-VL, 64 in LLaVA."""
    text = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 24, "num_key_value_heads": 8}
    tower = {"hidden_size": 768, "intermediate_size": 3072, "initializer_range": 0.02}
    vision: dict[str, dict[str, Any]] = {
        "qwen2_5_vl": {"depth": 8, "num_heads": 12},
        "llava": {"num_hidden_layers": 8, "num_attention_heads": 12, "image_size": 128, "patch_size": 16},
    }
    models = {}
    for family, sizes in vision.items():
        path = tiny_image_model(
            tmp_path_factory.mktemp(family), family, vision=tower | sizes, num_hidden_layers=6,
            initializer_range=0.02, **text,
        )  # fmt: skip
        file = path / "processor_config.json"
        processor = json.loads(file.read_text())
        pixels = processor["image_processor"]
        if family == "llava":
            processor["patch_size"] = 16
            pixels |= {"size": {"shortest_edge": 128}, "crop_size": {"height": 128, "width": 128}}
        else:
            pixels["size"] = {"shortest_edge": 256, "longest_edge": 128 * 128}
        file.write_text(json.dumps(processor))
        models[family] = str(path)
    return models


@pytest.mark.slow
@pytest.mark.linux("the peak of a phase is read from /proc")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.cluster] if case[1] > 1 else []) for name, case in CASES.items()]
)
def test_a_phase_takes_the_planned_memory(path, image_text, name):
    path = image_text.get(CASES[name][2].get("images"), path)
    plan, peak = planned(path, *CASES[name]), measured(path, *CASES[name])
    assert plan == pytest.approx(peak, rel=TOLERANCE), (
        f"planned {plan / 2**20:.0f} MiB, measured {peak / 2**20:.0f} MiB"
    )
