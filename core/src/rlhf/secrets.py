"""Recognise secrets in a configuration, which is copied into run directories, checkpoints and loggers, and read tokens.

A run file with a secret is refused (:func:`find_secrets`). Observers also pass a configuration through :func:`redact`,
which hides too much rather than too little. Both use the same words and the same forms of tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf.errors import ConfigError

HIDDEN = "<hidden>"

_WORD = (
    r"(^|[_.])((api|access|secret|private)_?key|secret|passw(or)?d|passphrase|credentials?|authorization|bearer|cookie"
    r"|(hf|hub|wandb|access|auth|api|bearer|refresh|session|secret|github|gitlab|openai|huggingface)_?token)"
)
_NAME = re.compile(rf"{_WORD}$|^token$", re.IGNORECASE)
"""``api_key``; not ``api_key_env``, which names an environment variable."""
_PART = re.compile(rf"{_WORD}|^(key|token|auth)$", re.IGNORECASE)
"""Also matches ``api_key_2``, for values that a log need not show."""
_FORMS = (
    r"hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[0-9A-Z]{16}|xox[abpr]-[\w-]{10,}|AIza[\w-]{30,}|nvapi-[\w-]{16,}|gsk_[A-Za-z0-9]{16,}"
    r"|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}"
)
_PRIVATE_KEY = "-----BEGIN [A-Z ]*PRIVATE KEY-----"
_VALUE = re.compile(
    rf"^({_FORMS}|Bearer\s+\S{{8,}})|^[a-z][a-z0-9+.-]*://[^/@\s:]*:[^/@\s]+@|{_PRIVATE_KEY}",
)
_HIDE = re.compile(rf"\b({_FORMS})\b|(?<=Bearer )\S+|{_PRIVATE_KEY}.*", re.DOTALL)
_IN_HEADERS = re.compile(r"[!-~]+")
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w\-]+)=([^&#\s]+)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+")
_ARGUMENT = re.compile(r"([\w-]+)(?:=|:\s+)(\S.*)", re.DOTALL)
"""``--api-key=abc``, ``API_KEY=abc`` and ``Authorization: Bearer abc`` in a command."""


def read_token(component: str, option: str, variable: str) -> str:
    """The token in an environment variable, for a header of requests.

    Args:
        component: the component whose ``option`` names the variable, for messages.

    Raises ConfigError, without the token, if the variable is not set, or if headers cannot hold its value. HTTP clients
    would show such a value in their errors.
    """
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            f"{component}: {option} = {variable!r}, but this environment variable is not set. Export it, or remove "
            f"{option}."
        )
    if _IN_HEADERS.fullmatch(token) is None:
        raise ConfigError(
            f"{component}: {option} = {variable!r}, but the value of this environment variable holds a space, a line "
            "break or a character outside ASCII, which no header of a request can hold. Export the token alone."
        )
    return token


def names_secret(key: str) -> bool:
    """Whether text under this key is treated as a secret."""
    return _NAME.search(key.replace("-", "_")) is not None


def find_secrets(data: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of values that look like a secret, by the key's name or by the form of the value: known forms of
    tokens, passwords and keys in URLs, and arguments of a command.

    Names of environment variables (``api_key_env = "NAME"``) are not secrets, nor are arguments like ``--key=$KEY``.
    """
    items: Iterator[tuple[Any, Any]]
    if isinstance(data, Mapping):
        items = iter(data.items())
    elif isinstance(data, list | tuple):
        items = iter(enumerate(data))
    else:
        return
    flag = ""
    for key, value in items:
        key_path = f"{path}.{key}" if path else str(key)
        if isinstance(value, str):
            has_name = names_secret(key) if isinstance(key, str) else _is_secret_argument(flag, value)
            if value and (has_name or _VALUE.search(value) or _is_secret_url(value)):
                yield key_path
            flag = value if value.startswith("-") else ""
        else:
            yield from find_secrets(value, key_path)


def _is_secret_argument(flag: str, text: str) -> bool:
    """Whether an entry of a list is a secret in a command. ``flag``: the entry before it, if it begins with a dash."""
    argument = _ARGUMENT.fullmatch(text)
    name, value = (argument[1], argument[2]) if argument else (flag, text)
    return names_secret(name.lstrip("-")) and not value.startswith("-") and "$" not in value


def _is_secret_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None and any(_hides(parameter[1]) for parameter in _QUERY.finditer(text))


def redact(value: Any, is_secret: bool = False) -> Any:
    """A copy with ``<hidden>`` for text under keys like ``api_key``, ``token``, ``password``, also in lists and tables
    there, for user names and passwords in URLs, for such parameters in their queries, and for well-known forms of
    tokens. Numbers stay (``max_tokens``), and so do tokens of a vocabulary (``eos_token``).

    Args:
        is_secret: whether ``value`` is under such a key.
    """
    if isinstance(value, Mapping):
        return {k: redact(v, is_secret or _hides(str(k))) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, is_secret) for item in value]
    if isinstance(value, str):
        if value and is_secret:
            return HIDDEN
        value = _USER_IN_URL.sub(HIDDEN, value)
        value = _QUERY.sub(lambda m: f"{m[1]}={HIDDEN if _hides(m[1]) else m[2]}", value)
        return _HIDE.sub(HIDDEN, value)
    return value


def _hides(key: str) -> bool:
    return _PART.search(key.replace("-", "_")) is not None
