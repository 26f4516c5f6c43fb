"""Which template the rows of a run are written with: a chat template, and which, or plain text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError

from rlhf_runtime.config.data_section import DataSection

LARGEST = 2**20
"""Largest number of bytes of a chat template."""


def named_template(section: DataSection) -> str:
    """The text of ``data.chat_template``.

    Raises ConfigError: rows are plain text, or the file is missing, cannot be read or is empty.
    """
    path = Path(section.chat_template or "").expanduser()
    if section.template == "plain":
        raise ConfigError(
            f"data.chat_template = {str(path)!r} does nothing with data.template = 'plain'; leave one out"
        )
    try:
        with path.open("rb") as file:  # which may be without an end
            content = file.read(LARGEST + 1)
        text = content[:LARGEST].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: cannot read {str(path)!r}: {error}. It is the path of a file with a Jinja template, "
            "such as chat_template.jinja beside a model."
        ) from None
    if len(content) > LARGEST:
        raise ConfigError(f"data.chat_template: {path} has more than {LARGEST:,} bytes; a template has some thousands")
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path} is empty")
    return text


def uses_chat(tokenizer: Any, section: DataSection) -> bool:
    """Whether rows are written with the tokenizer's chat template.

    Raises ConfigError: there is none and the section asks for one, or an option is for the other kind of template.
    """
    has = bool(tokenizer.chat_template)
    if section.template == "chat" and not has:
        raise ConfigError(
            "data.template = 'chat', but the tokenizer has no chat template. Name a file with one as "
            'data.chat_template, or use data.template = "plain".'
        )
    chat = has and section.template != "plain"
    only_chat = {"template_kwargs": bool(section.template_kwargs), "messages": section.messages is not None}
    only_plain = {"input_template": section.input_template is not None, "add_eos = false": not section.add_eos}
    for key, is_set in (only_plain if chat else only_chat).items():
        if is_set and chat:
            raise ConfigError(f"data.{key} is for plain text, but a chat template is used; set data.template = 'plain'")
        if is_set:
            why = "data.template = 'plain'" if section.template == "plain" else "the tokenizer has no chat template"
            raise ConfigError(f"data.{key} needs a chat template, but {why}")
    return chat
