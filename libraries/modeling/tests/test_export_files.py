"""The files of an export beside the weights: they are tried before the training, and can be written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_modeling import export_files
from rlhf_modeling.export_files import mend_generation, read_generation_config, token_classifier, try_export
from rlhf_modeling.pretrained import exporting, load_tokenizer
from rlhf_testing.tiny import tiny_model
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2_5OmniConfig, Qwen3Config


@pytest.mark.parametrize(
    ("fields", "mended", "changes"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"do_sample": True}, ["set do_sample = True"]),
        ({"do_sample": False, "temperature": 0.5}, {"temperature": None}, ["omit temperature = 0.5"]),
        ({"pad_token_id": -1}, {"pad_token_id": None}, ["omit pad_token_id = -1"]),
        (
            {"pad_token_id": -1, "temperature": 0.6, "length_penalty": 2.0},
            {"pad_token_id": None, "length_penalty": None, "do_sample": True},
            ["set do_sample = True", "omit length_penalty = 2.0, pad_token_id = -1"],
        ),
        ({"output_scores": True, "num_beams": 2, "early_stopping": True}, {"output_scores": None}, None),
        ({"do_sample": True, "temperature": 0.6}, {}, []),
    ],
)
def test_a_generation_config_becomes_one_that_transformers_writes(
    tmp_path: Path, fields: dict[str, Any], mended: dict[str, Any], changes: list[str] | None
) -> None:
    config = GenerationConfig(eos_token_id=[3, 4], bos_token_id=1, **fields)
    messages = mend_generation(config)
    config.save_pretrained(tmp_path)
    result = GenerationConfig.from_pretrained(tmp_path)
    for name, value in {"eos_token_id": [3, 4], "bos_token_id": 1, **fields, **mended}.items():
        assert getattr(result, name) == value, name
    assert changes is None or [sorted(c.split(", ")) for c in messages] == [sorted(c.split(", ")) for c in changes]


def spec_of(path: Path) -> ModelSpec:
    return ModelSpec(RoleSpec("policy", trained=True), str(path))


def test_trying_an_export_names_what_was_changed_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(tmp_path / "model", hidden=16, heads=2, kv_heads=1)
    spec, module = spec_of(path), AutoModelForCausalLM.from_pretrained(path)
    (places := tmp_path / "places").mkdir()
    monkeypatch.setattr(export_files.tempfile, "tempdir", str(places))
    assert try_export(spec, module, load_tokenizer(spec)) == ()
    module.generation_config.temperature = 0.5
    (note,) = try_export(spec, module, load_tokenizer(spec))
    assert str(path) in note
    assert "do_sample = True" in note
    module.config.a_set = {1}
    with pytest.raises(ModelError, match=r"role 'policy' could not be exported(.|\n)*set is not JSON serializable"):
        try_export(spec, module, load_tokenizer(spec))
    assert not list(places.iterdir())


def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert read_generation_config(spec_of(tmp_path), str(tmp_path)) is None
    for content in ('{"eos_token', json.dumps({"early_stopping": "x"})):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ModelError, match=r"generation_config\.json .* of role 'policy' cannot be read"):
            read_generation_config(spec_of(tmp_path), str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "fresh", "cls"),
    [
        ("classes", True, "Qwen3ForTokenClassification"),
        ("classes", False, None),
        ("lm", True, None),
    ],
)
def test_only_a_new_head_of_classes_is_exported_as_one_that_reads_every_token(kind, fresh, cls):
    """One that was loaded keeps its class: in another its labels would have a new bias."""
    module = SimpleNamespace(config=Qwen3Config(hidden_size=8, num_hidden_layers=1, vocab_size=16))
    assert token_classifier(SimpleNamespace(kind=kind, fresh_head=fresh, module=module)) == cls


def test_an_export_keeps_the_attention_of_every_part_of_a_config() -> None:
    """The vision encoder of DeepSeek-OCR-2 has a config inside that of the vision tower."""
    config = Qwen2_5OmniConfig()
    config._attn_implementation = "sdpa"
    part = config.thinker_config.vision_config
    with exporting(SimpleNamespace(config=config)):  # type: ignore[arg-type]
        assert part._attn_implementation is None
    assert part._attn_implementation == config._attn_implementation == "sdpa"
