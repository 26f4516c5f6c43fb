"""Take secrets out of a config before it leaves the machine. They should not be in it; this is the second lock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "<hidden>"

_SECRET_KEY = re.compile(
    r"(^|[_\-.])((api|access|secret|private)[_\-]?key|secret|passw(or)?d|credentials?|authorization|bearer|cookie"
    r"|(api|access|auth|refresh|session|hf|secret)[_\-]token)$|^(key|token|auth)$",
    re.IGNORECASE,
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET_IN_QUERY = re.compile(r"(?<=[?&])([\w\-]+)=([^&#\s]+)")
_KNOWN_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_\-]{16,}|gh[pousr]_[A-Za-z0-9]{20,})\b|(?<=Bearer )\S+"
)


def redact(value: Any) -> Any:
    """A copy with ``<hidden>`` for text under keys like ``api_key``, ``token``, ``password``, for user names and
    passwords in URLs, for such parameters in their queries, and for well-known forms of tokens. Numbers stay
    (``max_tokens``), and so do tokens of a vocabulary (``eos_token``)."""
    if isinstance(value, Mapping):
        return {k: HIDDEN if _is_secret(str(k), v) else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    if isinstance(value, str):
        value = _USER_IN_URL.sub(HIDDEN, value)
        value = _SECRET_IN_QUERY.sub(lambda m: f"{m[1]}={HIDDEN if _SECRET_KEY.search(m[1]) else m[2]}", value)
        return _KNOWN_TOKEN.sub(HIDDEN, value)
    return value


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_KEY.search(key) is not None
