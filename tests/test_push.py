"""`rlhf push`: huggingface_hub uploads a model's folder to a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rlhf_testing.tiny import tiny_model

from tests.support.hub import LoopbackHub

CLI = "from rlhf_cli.main import main; raise SystemExit(main())"
TOKEN = "hf_" + "Xw9" * 12
Push = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def push(tmp_path: Path) -> Push:
    def run(hub: LoopbackHub, *words: object, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        environment = {**clean, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
        return subprocess.run(
            [sys.executable, "-c", CLI, "push", *map(str, words)],
            env=environment if token is None else {**environment, "HF_TOKEN": token},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """An export with an adapter whose base is a folder here."""
    folder = tiny_model(tmp_path / "model", hidden=16, heads=2, kv_heads=1)
    (folder / "README.md").write_text("---\ntags:\n- rlhf\n---\nA model.\n")
    (folder / ".cache").write_text("not for others")
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"")
    settings = {"base_model_name_or_path": "/home/ada/base"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_a_model_is_uploaded_into_a_private_repository(push: Push, model: Path) -> None:
    with LoopbackHub() as hub:
        hub.writer = TOKEN
        done = push(hub, model, "owner/new")
        assert done.returncode == 0, done.stderr
        assert f"{hub.url}/owner/new" in done.stdout
        assert "adapter/ is not uploaded" in done.stderr
        repository = hub.repositories["model", "owner/new"]
        files = repository.commits[repository.refs["main"]]
        contents = {
            path.name: path.read_bytes() for path in model.iterdir() if path.is_file() and path.name != ".cache"
        }
        assert {name: content for name, content in files.items() if name != ".gitattributes"} == contents
        assert repository.private
        (model / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
        done = push(hub, model, "owner/open", "--public")
        assert done.returncode == 0, done.stderr
        repository = hub.repositories["model", "owner/open"]
        assert not repository.private
        assert "adapter/adapter_config.json" in repository.commits[repository.refs["main"]]
        done = push(hub, model, "owner/open")
        assert (done.returncode, "exists and is public" in done.stderr) == (1, True), done.stderr


def test_what_cannot_be_uploaded_is_refused_before_a_request(push: Push, model: Path, tmp_path: Path) -> None:
    with LoopbackHub() as hub:
        for words, token, message in (
            ((tmp_path / "not_looked_at", "owner/new"), None, "no hub token"),
            ((model, "new"), TOKEN, "Write it as owner/name"),
            ((tmp_path, "owner/new"), TOKEN, "is not a model's folder"),
            ((model / "adapter", "owner/new"), TOKEN, "is a folder on this machine"),
        ):
            done = push(hub, *words, token=token)
            assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert hub.requests == []
        done = push(hub, model, "owner/new")
        assert (done.returncode, "as owner/new failed: " in done.stderr) == (1, True), done.stderr
        assert TOKEN not in done.stderr + done.stdout, "the hub's answer repeats the token"
