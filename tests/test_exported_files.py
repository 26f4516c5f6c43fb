"""Exports of whole runs: config, generation config and chat templates of the folder that other programs load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rlhf_hub.published import add_older_names
from rlhf_testing.tiny import CHARS, tiny_model
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from tests.runs import Workshop, assert_same_run

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def generation(model: Path, **fields: Any) -> None:
    file = model / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("fields", [{"temperature": 0.6}, {"pad_token_id": -1}], ids=["temperature", "pad"])
def test_a_generation_config_that_transformers_does_not_write_is_mended(shop: Workshop, fields: dict[str, Any]) -> None:
    model = Path(shutil.copytree(shop.model, shop.folder / "model"))
    generation(model, **fields)
    run = shop.train("sft", "run", policy={"model": str(model)})
    assert "generation_config.json" in run.said
    exported = GenerationConfig.from_pretrained(run.path / "model")
    assert (exported.do_sample, exported.temperature) == ((True, 0.6) if "temperature" in fields else (None, None))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("rope", "older"),
    [
        ({"rope_type": "llama3", **LLAMA3}, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
    ],
    ids=["llama3", "partial"],
)
def test_an_export_has_the_names_that_transformers_4_reads_too(
    shop: Workshop, rope: dict[str, Any], older: dict[str, Any]
) -> None:
    kind = "glm4" if "partial_rotary_factor" in rope else "llama"
    model = tiny_model(shop.folder / "model", architecture=kind, rope_parameters={"rope_theta": 5e5, **rope})
    path = shop.train("sft", "run", policy={"model": str(model)}).path / "model"
    config = json.loads((path / "config.json").read_text())
    names = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    assert {name: config[name] for name in names if name in config} == {"rope_theta": 5e5, **older}
    exported, original = AutoConfig.from_pretrained(path), AutoConfig.from_pretrained(model)
    assert exported.rope_parameters == original.rope_parameters
    assert json.loads((path / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert type(AutoTokenizer.from_pretrained(path)) is type(AutoTokenizer.from_pretrained(model))


def test_a_config_that_names_no_kind_of_rotary_embeddings_gets_no_scaling(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"rope_parameters": {"rope_theta": 5e5}}')
    add_older_names(tmp_path)
    assert json.loads(file.read_text()) == {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 5e5}


def test_what_cannot_be_exported_is_refused_before_the_first_step(shop: Workshop) -> None:
    model = Path(shutil.copytree(shop.model, shop.folder / "model"))
    generation(model, early_stopping="x")
    for flags in (["--dry-run"], []):
        refused = shop.run("sft", "run", *flags, policy={"model": str(model)})
        assert refused.code == 1
        assert "generation_config.json" in refused.said
        assert "early_stopping" in refused.said
        assert not (refused.path / "metrics.jsonl").exists()


def test_a_resume_takes_a_changed_generation_config_with_the_same_end_tokens(shop: Workshop) -> None:
    model = Path(shutil.copytree(shop.model, shop.folder / "model"))
    changes: dict[str, Any] = {"policy": {"model": str(model)}, "checkpoint": {"every": 1}}
    baseline = shop.train("sft", "whole", **changes)
    shop.train("sft", "run", "--run.stop_after", "2", **changes)
    generation(model, eos_token_id=[1, 5])
    refused = shop.run("sft", "run", "--resume", **changes)
    assert (refused.code, "content of policy.model" in refused.said) == (1, True)
    generation(model, eos_token_id=[1], do_sample=True, temperature=0.7)
    resumed = shop.train("sft", "run", "--resume", **changes)
    assert_same_run(resumed, baseline)
    assert GenerationConfig.from_pretrained(resumed.path / "model").temperature == 0.7


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: its tokenizer has the tokens of ChatML, its end token is another one."""
    chars = [*CHARS, "<|im_start|>", "<|im_end|>"]
    return tiny_model(tmp_path_factory.mktemp("base") / "model", chars=chars, hidden=16, heads=2, kv_heads=1)


@pytest.mark.parametrize("algo", ["sft", "grpo"])
def test_every_end_token_of_the_run_ends_the_texts_of_its_export(shop: Workshop, base: Path, algo: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model = Path(shutil.copytree(base, shop.folder / "model"))
    tokenizer.save_pretrained(model)
    data = {"chat_template": str(shop.file("chatml.jinja", CHATML))}
    run = shop.train(algo, "run", policy={"model": str(model)}, data=data, run={"steps": 1})
    ends = GenerationConfig.from_pretrained(run.path / "model").eos_token_id
    assert ends == [1, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    if algo == "sft":
        plain = shop.train("sft", "plain", policy={"model": str(model)}, run={"steps": 1})
        assert GenerationConfig.from_pretrained(plain.path / "model").eos_token_id == 1


def test_a_named_chat_template_replaces_all_of_the_tokenizers_own(shop: Workshop) -> None:
    model = Path(shutil.copytree(shop.model, shop.folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": "d{{ eos_token }}", "tool_use": "t{{ eos_token }}"}
    tokenizer.save_pretrained(model)
    template = "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
    data = {"chat_template": str(shop.file("own.jinja", template))}
    run = shop.train("sft", "run", policy={"model": str(model)}, data=data, run={"steps": 1})
    exported = AutoTokenizer.from_pretrained(run.path / "model")
    assert exported.chat_template == template
    messages = [{"role": "user", "content": "1"}]
    assert exported.apply_chat_template(messages, tools=[{"type": "function"}], tokenize=False) == "u:1<eos>"
