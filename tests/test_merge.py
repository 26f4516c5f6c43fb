"""`rlhf merge`: an adapter in PEFT's form and its base become one folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.runs import Say, Workshop

IDS = torch.arange(3, 30)[None]


def foreign(folder: Path, base: Path, **options: object) -> torch.Tensor:
    """An adapter that peft wrote. Returns what it computes on its base."""
    import peft  # takes a second, for which a collection of tests need not wait

    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **options)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(folder)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["attention", "embeddings"])
def test_the_merged_folder_computes_what_base_and_adapter_compute(say: Say, tmp_path: Path, kind: str, tied: bool):
    base = tiny_model(tmp_path / "base", tied=tied)
    layers = ["q_proj"] if kind == "attention" else ["embed_tokens", "down_proj"]
    expected = foreign(tmp_path / "adapter", base, target_modules=layers)
    code, out, err = say("merge", tmp_path / "adapter", tmp_path / "new")
    assert code == 0, err
    assert "log-probs are those of" in out
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "new")(IDS).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "new")) > 0
    code, out, err = say("merge", tmp_path / "adapter", tmp_path / "half", "--dtype", "bf16")
    assert code == 0, err
    half, full = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "new"))
    assert all(torch.equal(half[name], full[name].bfloat16()) for name in full)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_adapter_of_a_run_becomes_the_model_that_the_run_wrote(say: Say, shop: Workshop):
    run = shop.train("sft", "sft", trainer={"lora": {"rank": 4, "modules_to_save": ["embed_tokens"]}, "lr": 1e-2})
    code, _, err = say("merge", run.path / "model" / "adapter", shop.folder / "new")
    assert code == 0, err
    new, expected = (load_file(folder / "model.safetensors") for folder in (shop.folder / "new", run.path / "model"))
    assert new.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=0)


def test_a_reward_model_keeps_its_head_mean_and_deviation(say: Say, shop: Workshop):
    run = shop.train("reward_model", "rm", trainer={"lora": {"rank": 4}, "lr": 1e-2})
    moved = shop.folder / "moved"
    shutil.copytree(run.path / "model" / "adapter", moved)
    code, out, err = say("merge", moved, shop.folder / "new", "--base", shop.model)
    assert code == 0, err
    assert "outputs are those of" in out
    models = [AutoModelForSequenceClassification.from_pretrained(f) for f in (shop.folder / "new", run.path / "model")]
    with torch.no_grad():
        new, expected = (model(IDS).logits for model in models)
    torch.testing.assert_close(new, expected, atol=1e-5, rtol=0)
    assert (models[0].config.mean, models[0].config.num_labels) == (models[1].config.mean, 1)


def test_a_reward_model_that_reads_images_becomes_the_model_that_the_run_wrote(say: Say, tmp_path: Path):
    shop = Workshop(tmp_path, tiny_image_model(tmp_path / "model"), tmp_path / "rows.jsonl")
    run = shop.train("reward_model", "rm", trainer={"lora": {"rank": 4}, "lr": 1e-2})
    code, out, err = say("merge", run.path / "model" / "adapter", tmp_path / "new")
    assert code == 0, err
    assert "outputs are those of" in out
    new, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "new", run.path / "model"))
    assert new.keys() == expected.keys()
    assert any("visual" in name for name in new)
    for name, tensor in expected.items():
        torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=0)
    configs = [json.loads((f / "config.json").read_text()) for f in (tmp_path / "new", run.path / "model")]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["mean"] == configs[1]["mean"]


def test_an_adapter_of_another_base_is_refused_and_nothing_is_written(say: Say, tmp_path: Path):
    base, other = tiny_model(tmp_path / "base"), tiny_model(tmp_path / "other", hidden=48)
    foreign(tmp_path / "adapter", base, target_modules=["q_proj"])
    new = tmp_path / "new"
    for words, message in (
        (("--base", other), "is an adapter of a different base"),
        (("--base", "/models/gone"), "this folder does not exist"),
    ):
        code, _, err = say("merge", tmp_path / "adapter", new, *words)
        assert (code, message in err) == (1, True), err
    code, _, err = say("merge", base, new)
    assert (code, "is not an adapter" in err) == (2, True), err
    code, _, err = say("merge", tmp_path / "adapter", other)
    assert (code, "exists" in err) == (2, True), err
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = say("merge", tmp_path / "adapter", new)
    assert (code, "cannot be read" in err) == (1, True), err
    assert not new.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "other"]


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_no_python_file_of_an_adapter_is_run_whatever_is_answered(say: Say, tmp_path: Path, monkeypatch, file: str):
    base, adapter = tiny_model(tmp_path / "base"), tmp_path / "adapter"
    foreign(adapter, base, target_modules=["q_proj"])
    changes = {
        "config.json": {"model_type": "other", "auto_map": {"AutoConfig": "other.Other"}},
        "tokenizer_config.json": {"tokenizer_class": "Other", "auto_map": {"AutoTokenizer": ["other.Other"] * 2}},
    }[file]
    (adapter / file).write_text(json.dumps(json.loads((base / file).read_text()) | changes))
    shutil.copy(base / "tokenizer.json", adapter)
    (adapter / "other.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w')\nclass Other: ...\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    code, _, err = say("merge", adapter, tmp_path / "new")
    assert code == 1
    assert f"{adapter}: the " in err
    assert not (tmp_path / "was-run").exists()
