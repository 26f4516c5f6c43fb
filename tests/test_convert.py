"""`rlhf convert`: GGUF files and folders of .bin weights become folders that trainers and samplers load."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_cli.jobs.source_models import GgufModel
from rlhf_testing.tiny import tiny_model, tiny_reward_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gguf_files import EOS, F32, PAD, Q8_0, TEMPLATE, TURN, write_gguf


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_bin(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """A tiny model whose weights are pickled. Returns them."""
    tiny_model(folder, **options)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize(("architecture", "kind"), [("llama", F32), ("qwen3", Q8_0)])
def test_a_gguf_file_becomes_a_folder_with_the_weights_that_it_stands_for(architecture, kind, say, tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf", architecture, kind, head=128 if architecture == "qwen3" else 8)
    code, out, err = say("convert", "tiny.gguf", "new")
    assert code == 0, err
    assert "with a chat template" in out
    assert "next: rlhf generate --model new" in out
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    generation = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([EOS, TURN], PAD)
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"], "transformers 4 reads the first name only"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.convert_ids_to_tokens(tokenizer("abba<eos>")["input_ids"]) == ["ab", "b", "a", "<eos>"]
    assert tokenizer.chat_template == TEMPLATE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "tiny.gguf"]
    assert say("generate", "--model", "new", "--prompt", "ab", "--sampling.max_new_tokens", "2")[0] == 0


def test_bf16_halves_the_weights(say, tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf")
    assert say("convert", "tiny.gguf", "new", "--dtype", "bf16")[0] == 0
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert all(torch.equal(tensors[name], weights[name].bfloat16()) for name in weights)
    assert json.loads((tmp_path / "new/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_of_bin_weights_is_converted_with_its_settings(sharded, say, tmp_path):
    weights = save_bin(tmp_path / "old", chat_template="default")
    (tmp_path / "old/generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.5}')
    if sharded:
        (tmp_path / "old/pytorch_model.bin").unlink()
        files = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
        halves = {name: files[n % 2] for n, name in enumerate(weights)}
        for file in files:
            torch.save({n: w for n, w in weights.items() if halves[n] == file}, tmp_path / "old" / file)
        index = {"metadata": {"total_size": 1}, "weight_map": halves}
        (tmp_path / "old/pytorch_model.bin.index.json").write_text(json.dumps(index))
    code, _, err = say("convert", "old", "new")
    assert code == 0, err
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    assert not (tmp_path / "new/pytorch_model.bin.index.json").exists()
    config = json.loads((tmp_path / "new/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")


def test_a_reward_model_keeps_its_class(say, tmp_path):
    tiny_reward_model(tmp_path / "old")
    weights = load_file(tmp_path / "old/model.safetensors")
    (tmp_path / "old/model.safetensors").unlink()
    torch.save(weights, tmp_path / "old/pytorch_model.bin")
    code, out, err = say("convert", "old", "new")
    assert code == 0, err
    assert "SequenceClassification" in out
    assert torch.equal(load_file(tmp_path / "new/model.safetensors")["score.weight"], weights["score.weight"])


def test_settings_beside_a_gguf_file_are_not_mixed_into_it(say, tmp_path):
    write_gguf(tmp_path / "sha256-0f")  # as Ollama names its files
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "another", "tokenizer_class": "BertTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert say("convert", "sha256-0f", "new")[0] == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template == TEMPLATE


def test_a_written_model_that_computes_otherwise_is_refused(say, tmp_path, monkeypatch):
    save = GgufModel.save

    def save_otherwise(model: GgufModel, module: Any, folder: Path) -> None:
        save(model, module, folder)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"][7, 7] += 1
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(GgufModel, "save", save_otherwise)
    write_gguf(tmp_path / "tiny.gguf")
    code, _, err = say("convert", "tiny.gguf", "new")
    assert code == 1
    assert "the outputs of the written model differ" in err
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_transformers_does_not_read_of_a_gguf_is_noted(say, tmp_path):
    values = {"llama__rope__scaling__type": "yarn", "tokenizer__chat_template__tool_use": "other"}
    write_gguf(tmp_path / "tiny.gguf", **values)
    code, _, err = say("convert", "tiny.gguf", "new")
    assert code == 0
    assert "llama.rope.scaling.type" in err
    assert "tokenizer.chat_template.tool_use" in err


def damage(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


GGUF: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": ({"general__architecture": "rwkv7"}, "the architecture 'rwkv7'"),
    "a vision part": ({"general__architecture": "clip"}, "mmproj"),
    "an adapter": ({"general__type": "adapter"}, "'adapter'"),
    "a part": ({"split__count": 3}, "llama-gguf-split --merge"),
    "no tokenizer that is known": ({"tokenizer__ggml__model": "rwkv"}, "tokenizer"),
    "another shape": ({"llama__feed_forward_length": 48}, "model.layers.0.mlp."),
    "a layer more": ({"llama__block_count": 3}, "model.layers.2."),
    "no end token": ({"tokenizer__ggml__eos_token_id": None}, "no end token"),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_that_is_no_model_is_refused(name, say, tmp_path):
    values, words = GGUF[name]
    write_gguf(tmp_path / "tiny.gguf", **values)
    code, out, err = say("convert", "tiny.gguf", "new")
    assert (code, out) == (1, "")
    assert "tiny.gguf" in err
    assert words in err
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("size", [10, 3000, -100])
def test_a_gguf_file_that_was_cut_is_refused(size, say, tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    damage(tmp_path / "tiny.gguf", size)
    code, _, err = say("convert", "tiny.gguf", "new")
    assert code == 1
    assert "truncated" in err
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_one_part_of_a_split_gguf_is_known_by_its_name(say, tmp_path):
    (tmp_path / "big-00002-of-00003.gguf").write_bytes(b"GGUF, of which nothing is read")
    assert "llama-gguf-split --merge" in say("convert", "big-00002-of-00003.gguf", "new")[2]


def test_a_missing_package_is_named_with_its_installation(say, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    code, _, err = say("convert", "tiny.gguf", "new")
    assert code == 2
    assert "pip install gguf" in err


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


BIN: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (lambda old: torch.save({"more": Harmful()}, old / "pytorch_model.bin"), "more than tensors"),
    "no weight": (lambda old: torch.save({}, old / "pytorch_model.bin"), "lacks"),
    "cut": (lambda old: damage(old / "pytorch_model.bin", 2000), "old"),
    "no config": (lambda old: (old / "config.json").unlink(), "config"),
    "another config": (lambda old: set_config(old, intermediate_size=48), "mlp."),
    "an unknown class": (lambda old: set_config(old, architectures=["MyModel"]), "MyModel"),
    "quantised": (lambda old: set_config(old, quantization_config={"quant_method": "gptq"}), "quantised"),
    "an encoder and a decoder": (lambda old: (old / "config.json").write_text('{"model_type": "t5"}'), "encoder"),
    "an adapter": (lambda old: (old / "adapter_config.json").write_text("{}"), "adapter"),
    "a missing part": (
        lambda old: (old / "pytorch_model.bin").rename(old / "pytorch_model.bin.index.json").write_text(
            '{"metadata": {}, "weight_map": {"a": "pytorch_model-00001-of-00001.bin"}}'
        ),
        "pytorch_model-00001-of-00001.bin",
    ),
    "safetensors": (lambda old: (old / "model.safetensors").write_bytes(b""), "already has safetensors"),
    "no weights at all": (lambda old: (old / "pytorch_model.bin").unlink(), "holds no weights"),
}  # fmt: skip


def set_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize("name", BIN)
def test_a_folder_that_is_not_converted_is_refused(name, say, tmp_path):
    change, words = BIN[name]
    save_bin(tmp_path / "old")
    change(tmp_path / "old")
    code, out, err = say("convert", "old", "new")
    assert (code, out) == (1, "")
    assert words in err
    assert [p.name for p in tmp_path.iterdir()] == ["old"]


def test_the_place_is_checked_before_the_weights_are_read(say, tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert "full exists" in say("convert", "tiny.gguf", "full")[2]
    assert "no file or folder no.gguf" in say("convert", "no.gguf", "new")[2]
    (tmp_path / "text.gguf").write_text("no model")
    assert "text.gguf is not a GGUF file" in say("convert", "text.gguf", "new")[2]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    code, _, err = say("convert", "tiny.gguf", "new")
    assert code == 1
    assert "GB are free" in err
    assert not (tmp_path / "new").exists()


ROW = '{"prompt": "a", "response": "b", "answer": "b"}\n'
TRAIN = ("train", "--data", "rows.jsonl", "--output", "run")
JUDGED = ("--reward", "model:MODEL", "--sampling.samples_per_prompt", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": (*TRAIN, "--algo", "sft", "--model", "MODEL"),
    "a reference": (*TRAIN, "--algo", "dpo", "--model", "ok", "--reference.model", "MODEL"),
    "a reward": (*TRAIN, "--algo", "rloo", "--model", "ok", *JUDGED),
    "a dry run": (*TRAIN, "--algo", "sft", "--model", "MODEL", "--dry-run"),
    "plan": ("plan", "--algo", "sft", "--model", "MODEL", "--data", "rows.jsonl"),
    "eval": ("eval", "--model", "MODEL", "--data", "rows.jsonl", "--reward", "math"),
    "generate": ("generate", "--model", "MODEL", "--prompt", "a"),
    "score": ("score", "--model", "ok", "--reward", "model:MODEL", "--data", "rows.jsonl", "-o", "scores.jsonl"),
    "serve-reward": ("serve-reward", "--reward", "model:MODEL", "--port", "0"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_model_of_another_format_is_refused_with_the_command_that_converts_it(name, say, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROW)
    tiny_model(tmp_path / "ok")
    (tmp_path / "files").mkdir()
    for path in ("a file.gguf", "files/b.gguf", "files/mmproj.gguf"):
        (tmp_path / path).write_bytes(b"GGUF")
    (tmp_path / "old").mkdir()
    shutil.copy(tmp_path / "ok/config.json", tmp_path / "old")
    (tmp_path / "old/pytorch_model.bin").write_bytes(b"")
    files = sorted(tmp_path.rglob("*"))
    commands = {
        "a file.gguf": "rlhf convert 'a file.gguf' 'a file'",
        "files": "rlhf convert files/b.gguf files/b",
        "old": "rlhf convert old old-safetensors",
    }
    for model, command in commands.items():
        code, _, err = say(*(word.replace("MODEL", model) for word in COMMANDS[name]))
        assert (code, command in err) == (1, True), err
    assert sorted(tmp_path.rglob("*")) == files
