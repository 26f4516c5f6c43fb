"""Recognise secrets in a configuration: it is copied into run directories, checkpoints and loggers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_KEY = re.compile(
    r"(^|_)(api_?key|secret(_?key)?|password|passwd|passphrase|private_?key|access_?key|credentials?|authorization"
    r"|(hf|hub|wandb|access|auth|api|bearer|refresh|github|gitlab|openai|huggingface)_?token)$|^token$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"^(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,}|AIza[\w-]{30,}|Bearer\s+\S{8,})"
    r"|^[a-z][a-z0-9+.-]*://[^/@\s:]+:[^/@\s]+@"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def names_secret(key: str) -> bool:
    """Whether text under this name is taken for a secret."""
    return _KEY.search(key.replace("-", "_")) is not None


def find_secrets(data: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of what looks like a secret: by the key's name, or by the form of the value.

    Names of environment variables (``api_key_env = "NAME"``) are none.
    """
    items: Iterator[tuple[Any, Any]]
    if isinstance(data, Mapping):
        items = iter(data.items())
    elif isinstance(data, list | tuple):
        items = iter(enumerate(data))
    else:
        return
    for key, value in items:
        here = f"{path}.{key}" if path else str(key)
        named = isinstance(key, str) and names_secret(key)
        if isinstance(value, str) and value and (named or _VALUE.search(value)):
            yield here
        else:
            yield from find_secrets(value, here)
