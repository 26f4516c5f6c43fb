"""The command `rlhf plan`: a table, JSON, exit codes, and the lines of `rlhf train --dry-run`."""

from __future__ import annotations

import json
import re

import pytest
import torch
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model
from safetensors.torch import save_file

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
"""Qwen3 0.6B: 596,049,920 parameters."""
CLUSTER = [
    "--backend", "ray", "--trainer.stage", "2", "--placement.policy.ranks", "2", "--placement.generator.ranks", "2",
    "--placement.generator.share", "policy",
]  # fmt: skip


@pytest.fixture
def words(tmp_path):
    """Of a run whose model is a config.json and whose data does not exist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    model, data = str(tmp_path / "model"), str(tmp_path / "absent.jsonl")
    return ["plan", "--algo", "grpo", "--model", model, "--data", data, "--reward", "math",
            "--sampling.samples_per_prompt", "4"]  # fmt: skip


def test_a_table_of_places_and_memory(words, capsys):
    every = ["--checkpoint.every", "10"]
    assert main([*words, *every, "--device", "cpu", "--device-memory", "64GiB", "--policy.dtype", "fp32"]) == 0
    out = capsys.readouterr().out
    assert "Placement: 1 device" in out
    assert "596,049,920" in out
    rows = [re.split(r"\s*│\s*", line.strip("│ \n")) for line in out.splitlines() if "│" in line]
    assert ["policy", "weights", "2.22 GiB", "2.22 GiB", "2.22 GiB"] in rows
    assert ["optimizer", "", "4.44 GiB", "4.44 GiB"] in rows
    assert ["gradients", "", "", "2.22 GiB"] in rows
    assert any(row[:2] == ["generator", "cache"] for row in rows)
    assert "fits: the host has 64.0 GiB" in out
    assert "a checkpoint takes about 6.66 GiB of disk; the run has up to 4 at a time: 26.6 GiB" in out


def test_json_holds_bytes(words, capsys):
    assert main([*words, "--device", "cpu", "--device-memory", "64GiB", "--policy.dtype", "fp32", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["fits"], plan["device"], plan["device_memory"], plan["nearest"]) == (True, "cpu", 64 * 2**30, None)
    policy = plan["placement"][0]
    assert (policy["name"], policy["parameters"], policy["trained"]) == ("policy", 596_049_920, True)
    [group] = plan["groups"]
    train = group["phases"]["train"]
    assert train["rows"]["policy"]["weights"] == 4 * 596_049_920
    assert train["total"] == sum(size for parts in train["rows"].values() for size in parts.values())
    assert list(group["phases"]) == ["load", "generate", "train"]
    assert plan["checkpoints"] == {"bytes": 12 * 596_049_920, "most": 1}


def test_a_plan_that_does_not_fit_says_why_and_suggests_one_that_does(words, capsys):
    assert main([*words, "--device-memory", "9GiB", "--generator.memory_share", "0.4", *CLUSTER]) == 1
    out = capsys.readouterr().out
    assert "does not fit: a device has 9.00 GiB" in out
    assert "policy 0-1: the phase 'train' needs" in out
    assert "policy weights 2.22 GiB = 596 M parameters x 4 bytes" in out
    change = re.search(r"The nearest change that fits: (.+)", out)
    assert change, out
    command = [*words, "--device-memory", "9GiB", "--generator.memory_share", "0.4", *CLUSTER, *change[1].split()]
    assert main(command) == 0, "the flags that it names do make it fit"


def test_a_plan_that_no_option_makes_fit_says_so(words, capsys):
    assert main([*words, "--device", "cpu", "--device-memory", "1GiB"]) == 1
    assert "No change that the plugins know makes it fit" in capsys.readouterr().out


def test_unknown_memory_is_reported(words, capsys, monkeypatch):
    monkeypatch.setattr("rlhf_cli.plan.command.gpu_memory", lambda: None)
    assert main([*words, "--device", "cuda"]) == 0
    assert "whether it fits is not known: give a device's memory, e.g. --device-memory 80GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device-memory", "lots"], "--device-memory is 'lots'; give a number and a unit"),
        (["--placement.critic.ranks", "2"], "[placement.critic]: this run has only policy, generator"),
        (["--trainer.stge", "3"], "unknown key"),
    ],
)
def test_wrong_usage(words, flags, message, capsys):
    assert main([*words, *flags]) == 2
    assert message in capsys.readouterr().err


def test_engines_that_do_not_fit_their_devices(words, tmp_path, capsys):
    """Said before anything starts, by the plan and by the run."""
    message = "tensor_parallel x pipeline_parallel = 3 x 1 = 3 workers"
    divided = [*CLUSTER, "--generator.tensor_parallel", "3"]
    assert main([*words, *divided]) == 2
    assert message in capsys.readouterr().err
    model = tiny_model(tmp_path / "tiny")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    train = ["train", *words[1:4], str(model), "--data", str(tmp_path / "data.jsonl"), *words[7:]]
    assert main([*train, *divided, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
    assert main([*train, *divided]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_a_config(words, tmp_path, capsys):
    (tmp_path / "model" / "config.json").unlink()
    assert main(words) == 1
    assert "no config.json in" in capsys.readouterr().err


def test_an_adapter_that_peft_wrote_is_planned_as_its_base(words, tmp_path, capsys):
    """PEFT writes no config.json beside an adapter."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"a": torch.zeros(3)}, adapter / "adapter_model.safetensors")
    words = [str(adapter) if word == str(model) else word for word in words]
    assert main([*words, "--device", "cpu", "--device-memory", "64GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"][0]["parameters"] == 596_049_920


def test_a_dry_run_says_the_same(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    words = ["--algo", "grpo", "--model", str(model), "--data", str(tmp_path / "data.jsonl"), "--reward", "math",
             "--sampling.samples_per_prompt", "4"]  # fmt: skip
    assert main(["train", *words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# place policy: in this process\n" in out
    assert re.search(r"^# memory host: load .+, generate .+, train .+$", out, re.MULTILINE)
    assert re.search(r"^# fits: ", out, re.MULTILINE)
    assert "# assumes prompts of 4 tokens, the longest of 4 rows\n" in out
