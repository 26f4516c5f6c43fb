"""The options of ``[data]`` that choose a chat template, or that need a template that supports them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, DataError

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.messages import REASONING
from rlhf_runtime.data.written_parts import mark

LARGEST = 2**20
"""Largest number of bytes of a chat template."""


def named_template(section: DataSection) -> str:
    """The text of ``data.chat_template``.

    Raises ConfigError: rows are plain text, or the file is missing, cannot be read or is empty.
    """
    path = Path(section.chat_template or "").expanduser()
    if section.template == "plain":
        raise ConfigError(
            f"data.chat_template = {str(path)!r} has no effect with data.template = 'plain'; remove one of the two"
        )
    try:
        with path.open("rb") as file:  # which may be endless
            content = file.read(LARGEST + 1)
        text = content[:LARGEST].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"data.chat_template: cannot read {str(path)!r}: {error}. It must be the path of a file with a Jinja "
            "template, such as chat_template.jinja beside a model."
        ) from None
    if len(content) > LARGEST:
        raise ConfigError(f"data.chat_template: {path} has more than {LARGEST:,} bytes; a template has a few thousand")
    if not text.strip():
        raise ConfigError(f"data.chat_template: {path} is empty")
    return text


def uses_chat(tokenizer: Any, section: DataSection) -> bool:
    """Whether rows are written with the tokenizer's chat template.

    Raises ConfigError: the section asks for a chat template and there is none, or an option is for the other kind of
    template.
    """
    has = bool(tokenizer.chat_template)
    if section.template == "chat" and not has:
        raise ConfigError(
            "data.template = 'chat', but the tokenizer has no chat template. Set data.chat_template to a file "
            'with one, or use data.template = "plain".'
        )
    chat = has and section.template != "plain"
    only_chat = {
        "template_kwargs": bool(section.template_kwargs),
        "messages": section.messages is not None,
        "earlier_answers = 'sampled'": section.earlier_answers == "sampled",
    }
    only_plain = {"add_eos = false": not section.add_eos}
    for key, is_set in (only_plain if chat else only_chat).items():
        if is_set and chat:
            raise ConfigError(f"data.{key} is for plain text, but a chat template is used; set data.template = 'plain'")
        if is_set:
            reason = "data.template = 'plain'" if section.template == "plain" else "the tokenizer has no chat template"
            raise ConfigError(f"data.{key} needs a chat template, but {reason}")
    return chat


def check_options(text: Callable[..., str], section: DataSection) -> None:
    """Raises ConfigError: the template does not write ``data.system``, or a tool of ``data.template_kwargs``.

    Args:
        text: ``ChatTemplate.text``.
    """
    user = {"role": "user", "content": "x"}
    with suppress(DataError):  # the error about the first row says what the template refuses
        if section.system and mark(0) not in text([{"role": "system", "content": mark(0)}, user], answer=True):
            raise ConfigError(
                "data.system: the chat template leaves out system messages, so it would have no effect. Put the text "
                "into the prompts, or use a template that writes system messages: see data.chat_template."
            )
        tools = section.template_kwargs.get("tools")
        for tool in tools if isinstance(tools, list) else ():
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            if isinstance(name, str) and name not in text([user], answer=True):
                raise ConfigError(
                    f"data.template_kwargs: the chat template leaves out the tool {name!r}, so the policy would not "
                    "see it. Use a template that writes tools: see data.chat_template."
                )


def reasoning_field(chat: ChatTemplate | None) -> str:
    """The field of a message in which the chat template reads reasoning. Raises ConfigError: it reads none."""
    reason = "no chat template is used"
    if chat is not None:
        reason = f"the chat template writes none of {', '.join(REASONING)}"
        for field in REASONING:
            answer = {"role": "assistant", "content": "x", field: mark(0)}
            with suppress(DataError):
                if mark(0) in chat.text([{"role": "user", "content": "x"}, answer], answer=False):
                    return field
    raise ConfigError(
        f"data.reasoning: {reason}, so the reasoning would be lost. Use a template that writes it "
        "(data.chat_template), or join reasoning and answer in one column."
    )
