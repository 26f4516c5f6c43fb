"""`rlhf convert`: GGUF files and folders of .bin weights become folders that trainers and samplers load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_cli.main import main
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gguf_files import EOS, F32, PAD, Q8_0, TEMPLATE, TURN, write_gguf

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(w) for w in words])
        return code, *capsys.readouterr()

    return run


def save_bin(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """A tiny model whose weights are pickled. Returns them."""
    tiny_model(folder, **options)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    return weights


@pytest.mark.parametrize(("architecture", "kind"), [("llama", F32), ("llama", Q8_0), ("qwen3", Q8_0)])
def test_a_gguf_file_becomes_a_folder_with_the_weights_that_it_stands_for(architecture, kind, say, tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf", architecture, kind, head=128 if architecture == "qwen3" else 8)
    code, out, err = say("convert", "tiny.gguf", "new")
    assert code == 0, err
    assert "with a chat template" in out
    assert "next: rlhf generate --model new" in out
    written = load_file(tmp_path / "new/model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    generation = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == ([EOS, TURN], PAD)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer.convert_ids_to_tokens(tokenizer("abba<eos>")["input_ids"]) == ["ab", "b", "a", "<eos>"]
    assert tokenizer.chat_template == TEMPLATE
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "tiny.gguf"]
    assert say("generate", "--model", "new", "--prompt", "ab", "--sampling.max_new_tokens", "2")[0] == 0


def test_bf16_halves_the_weights(say, tmp_path):
    weights = write_gguf(tmp_path / "tiny.gguf")
    assert say("convert", "tiny.gguf", "new", "--dtype", "bf16")[0] == 0
    written = load_file(tmp_path / "new/model.safetensors")
    assert all(torch.equal(written[name], weights[name].bfloat16()) for name in weights)
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
    written = load_file(tmp_path / "new/model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "old" / name).read_bytes()
    assert not (tmp_path / "new/pytorch_model.bin.index.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "new")
