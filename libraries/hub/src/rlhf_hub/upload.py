"""Uploads a model's folder to a hub, through the hub's own client, which handles the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf.errors import ConfigError
from rlhf.secrets import redact

from rlhf_hub.adapter_folders import ADAPTER_CONFIG, read_adapter_config
from rlhf_hub.hub import HubError, hub_name

ADAPTER = "adapter"
"""The folder inside an export that contains only its adapters."""


def require_token() -> None:
    """Raises ConfigError if the hub's client has no token."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ConfigError(
            "there is no hub token, so nothing can be uploaded. Set HF_TOKEN to a token with write permission, or log "
            "in: hf auth login"
        )


def push(folder: Path, repo: str, private: bool, note: Callable[[str], None]) -> str:
    """Upload a model's folder to the repository ``owner/name``, which is created if it does not exist. Returns its
    address.

    Args:
        note: shows which files are left out.

    Raises ConfigError before any request if there is no token or no model, or if the base of an adapter is a local
    folder; ModelError if the settings of an adapter cannot be read; HubError if the hub refuses, or if its repository
    is public although ``private`` is set.
    """
    import huggingface_hub

    require_token()
    name = hub_name(repo)
    if name is None or "/" not in name.name or "@" in repo:
        raise ConfigError(f"REPO {repo!r} is not the name of a hub repository. Write it as owner/name.")
    _require_model(folder)
    left_out = [".*", "**/.*"]
    if _names_folder(folder / ADAPTER):
        left_out.append(f"{ADAPTER}/*")
        note(
            f"{ADAPTER}/ is not uploaded: its base is a folder on this machine. Set base_model_name_or_path in "
            f"{folder / ADAPTER / ADAPTER_CONFIG} to the base's name on a hub to upload it"
        )
    client = huggingface_hub.HfApi()
    try:
        url = client.create_repo(name.name, private=private, exist_ok=True)
        if private and not client.repo_info(name.name).private:
            raise HubError(f"the repository {name.name} exists and is public. Use --public to upload to it.")
        client.upload_folder(
            repo_id=name.name, folder_path=folder, ignore_patterns=left_out, commit_message="Upload a model by rlhf"
        )
    except HubError:
        raise
    except Exception as error:  # of the client or its transport
        raise HubError(
            f"the upload of {folder} as {name.name} failed: {redact(f'{type(error).__name__}: {error}')}. Check the "
            "name, and that the token may write there."
        ) from error
    return str(url)


def _require_model(folder: Path) -> None:
    """Raises ConfigError if a folder contains no model that others could load."""
    weights = any(folder.glob("*.safetensors"))
    if not weights or not any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        raise ConfigError(
            f"{folder} is not a model's folder: it needs config.json or {ADAPTER_CONFIG}, and *.safetensors. For a "
            "run, use its folder model/."
        )
    if _names_folder(folder):
        raise ConfigError(
            f"the base of the adapter {folder} is a folder on this machine, which nobody else can read. Set "
            f"base_model_name_or_path in its {ADAPTER_CONFIG} to the base's name on a hub, or merge it: rlhf merge"
        )


def _names_folder(folder: Path) -> bool:
    """Whether the adapter in a folder, if there is one, has a base that is not a name on a hub."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return False
    base = read_adapter_config(file).get("base_model_name_or_path")
    return not isinstance(base, str) or hub_name(base) is None
