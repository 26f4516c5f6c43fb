"""Folders of models and adapters: the base that an adapter names, and the files that count as content."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import ModelError
from rlhf_hub.adapter_folders import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of, require_base
from rlhf_hub.published import content_of, model_folder
from rlhf_hub.upload import push


@pytest.mark.parametrize(("base", "is_folder"), [("owner/name", False), ("models/owner/name", True)])
def test_slashes_of_a_revision_do_not_make_a_base_a_folder(tmp_path, base, is_folder):
    config = {"base_model_name_or_path": base, "revision": "refs/pr/1"}
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps(config))
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    if is_folder:
        with pytest.raises(ModelError, match="but this folder does not exist"):
            require_base(adapter_of(str(tmp_path)))
    else:
        require_base(adapter_of(str(tmp_path)))


def test_a_folder_of_models_is_no_model(tmp_path):
    for name in ("model", "model-best", "rollouts"):
        (tmp_path / name).mkdir()
    assert model_folder(str(tmp_path)) == str(tmp_path)
    for name in ("model", "model-best"):
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"not a model, but holds models: {tmp_path}/model, {tmp_path}/model-best$"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == str(tmp_path)


def test_a_dangling_link_is_no_content(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    content = content_of(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    assert content_of(tmp_path) == content


def test_an_adapter_with_damaged_settings_is_not_uploaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    (tmp_path / ADAPTER_CONFIG).write_text("{")
    (tmp_path / ADAPTER_WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelError, match=rf"{ADAPTER_CONFIG} cannot be read: .*Copy the adapter again"):
        push(tmp_path, "owner/name", private=True, note=print)
