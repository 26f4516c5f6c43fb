"""Prompts of rows as tokens, encoded as plain text or with the chat template, which shows the tools of the row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, cast

from rlhf.errors import DataError
from rlhf.types import Row, Trajectory, Turn

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.chat_messages import ChatMessages, Tools
from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.input_template import fill, template_columns
from rlhf_runtime.data.messages import as_api_writes, as_people_read, text_of, with_text
from rlhf_runtime.data.observations import Observations
from rlhf_runtime.data.row_fields import Cells, Message
from rlhf_runtime.data.row_images import NO_IMAGES, RowImages, with_urls
from rlhf_runtime.data.sources import DEFAULTS, TOOLS, SourceLayout, named_columns
from rlhf_runtime.data.template_options import check_options, named_template, uses_chat
from rlhf_runtime.data.text_tokens import TextTokens
from rlhf_runtime.data.tokenizer import decoder_of
from rlhf_runtime.data.written_parts import mark

_CACHED_PROMPTS = 4096
_CACHED_BYTES = 2**28
"""Largest number of bytes of images in cached prompts."""
EMPTY = "the prompt is empty"
TEXT_OR_MESSAGES = "text or a list of {role, content} messages"


class Prompts:
    """Encodes the prompts of a run's rows. The tokens depend on the row only.

    If the section names a chat template, it becomes the tokenizer's template.

    Args:
        images: the tokens of images, or a text that says why the run cannot have images.
        day: the time that a chat template reads as now. Default: the current time.

    Raises ConfigError if an option needs something that the tokenizer or the kind of template does not have.
    """

    def __init__(
        self,
        tokenizer: Any,
        section: DataSection,
        images: ImageTokens | str = NO_IMAGES,
        day: datetime | None = None,
    ) -> None:
        self.tokenizer, self.section = tokenizer, section
        self.images = RowImages(tokenizer, images, section.image_limit)
        if section.chat_template is not None:
            tokenizer.chat_template = named_template(section)
        self.chat: ChatTemplate | None = None
        self._row_tools: RowTools
        if uses_chat(tokenizer, section):
            self.chat = ChatTemplate(tokenizer, section.template_kwargs, day)
            check_options(self.chat.text, section)
            self._row_tools = RowTools(self.chat)
        if section.input_template is not None:
            template_columns(section.input_template)
        self.layout = SourceLayout({**DEFAULTS, TOOLS: TOOLS, **named_columns(section)}, chat=self.chat is not None)
        """How rows without a layout are read."""
        self.tokens = TextTokens(tokenizer)
        self.observations = Observations(self.chat, self.tokens, self.images, section.earlier_answers == "sampled")
        self.decode = decoder_of(tokenizer, special_tokens=False)
        """Converts tokens to text, without special tokens."""
        self.require_text = False
        """Whether an empty prompt is refused, because the policy reads nothing else of a row."""
        self.shows_tools = True
        """Whether prompts that the policy answers show the tools of their rows. A rollout that encodes messages shows
        its own tools. Answers of the data always follow the tools of their row."""
        self._prompts: dict[tuple[str, int], tuple[Row, Turn, memoryview]] = {}
        self._cached_bytes = 0

    def encode_prompt(self, row: Row) -> Turn:
        """The tokens of the row's prompt, up to where the policy answers."""
        key = (row.source, row.index)
        cached_row, turn, _ = self._prompts.get(key, (row, None, None))
        # Training and evaluation data may have sources with the same name, whose layouts have other folders of images.
        if turn is None or cached_row.layout is not row.layout or cached_row.columns != row.columns:
            turn = self._prompt_turn(row, self.shows_tools)
            self._cached_bytes += sum(len(image.data) for image in turn.images)
            if len(self._prompts) >= _CACHED_PROMPTS or self._cached_bytes > _CACHED_BYTES:
                self._prompts.clear()
                self._cached_bytes = 0
            # The samples of a prompt share its array. An array that is viewed cannot grow or shrink.
            self._prompts[key] = (row, turn, memoryview(turn.ids))
        return replace(turn)

    def prompt_of(self, trajectory: Trajectory) -> str | list[Message] | None:
        """The prompt of a trajectory: its row's prompt with ``data.system``, as text (plain) or messages (chat). None
        if its context also has tools of the row or a text of an environment, or if the trajectory failed before it had
        a context."""
        row, turns = trajectory.row, trajectory.turns
        if not turns or turns[0].ids != self.encode_prompt(row).ids:
            return None
        if len(turns) > 1 and not turns[1].sampled:  # the opening of an environment, in plain text
            return None
        cells = self._cells(row)
        if self.chat is None:
            return self._plain_prompt(cells)
        return [*self._read_prompt(cells)[0]] if self._chat_of(cells, self.shows_tools) is self.chat else None

    def encode_opening(self, row: Row, text: str) -> list[Turn]:
        """The row's prompt with the environment's first observation. If the prompt ends with a user message, the
        observation is added to it after a blank line; otherwise it is another message. Plain text is concatenated."""
        if not text:
            return [self.encode_prompt(row)]
        if self.chat is None:
            return [self.encode_prompt(row), self.observations.encode(text)]
        cells = self._cells(row)
        messages, images = self._read_prompt(cells)
        if messages[-1]["role"] == "user":
            content = messages[-1]["content"]
            messages[-1] = {**messages[-1], "content": with_text(content, f"\n\n{text}") if content else text}
        else:
            messages.append({"role": "user", "content": text})
        opened = self._chat_of(cells, self.shows_tools).text(messages, answer=True)
        return [self.images.turn(self.tokens.ids(opened), images, as_people_read(messages))]

    def opening_ids(self, row: Row, text: str) -> list[int]:
        """The tokens of :meth:`encode_opening`. In plain text, too, a blank line comes before ``text``."""
        separated = f"\n\n{text}" if text and self.chat is None else text
        return [i for turn in self.encode_opening(row, separated) for i in turn.ids]

    def prompt_messages(self, row: Row) -> list[dict[str, Any]]:
        """The messages of :meth:`encode_prompt`, with images as ``data:`` URLs in parts. Raises DataError."""
        # Raises DataError if prompts are plain text.
        _ = self.messages
        cells = self._cells(row)
        messages, images = self._read_prompt(cells)
        prompt = self.images.in_parts(messages)
        if prompt != messages:
            chat = self._chat_of(cells, self.shows_tools)
            if chat.text(prompt, answer=True) != chat.text(messages, answer=True):
                raise DataError(
                    "the rollout reads prompts as messages with images in parts, but the chat template writes a part "
                    "{type: image} differently from the placeholder in the prompt's text. Write the image as a part"
                )
        return as_api_writes(with_urls(prompt, images))

    @cached_property
    def messages(self) -> ChatMessages:
        """Encodes conversations, as programs write them. Raises DataError: prompts are plain text."""
        if self.chat is None:
            raise DataError(
                "the rollout encodes messages, which needs a chat template, but prompts are plain text. Use a "
                "tokenizer with a chat template, or set data.chat_template to a file with one."
            )
        ends = self.tokenizer.convert_ids_to_tokens(list(self.end_token_ids))
        return ChatMessages(self.tokenizer, self.chat, self.tokens, self.images, ends)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the tokenizer's end token and the chat template's, if it differs."""
        ids = [self.tokenizer.eos_token_id]
        if self.chat is not None:
            turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
            render = self.chat.render(turns, [1], as_asked=False)
            last = self.tokens.ids(render.text[: render.answers[1][1]])[-1]
            if last in self.tokenizer.all_special_ids or last in self.tokenizer.get_added_vocab().values():
                ids.append(last)
        return tuple(dict.fromkeys(ids))

    # -------------------------------------------------------------------- from a row to its prompt

    def _cells(self, row: Row) -> Cells:
        layout = cast(SourceLayout | None, row.layout)  # TrainData gave it to the row
        return Cells(row, layout or self.layout)

    def _chat_of(self, cells: Cells, shows_tools: bool = True) -> ChatTemplate:
        """The chat template, with the tools of the row or without them."""
        return self._row_tools.template(cells.tools() if shows_tools else ())

    def _prompt_turn(self, row: Row, shows_tools: bool) -> Turn:
        cells = self._cells(row)
        if self.chat is None:
            text = self._plain_prompt(cells)
            if self.require_text and not text.strip():
                raise DataError(f"{EMPTY}; there is nothing to answer")
            ids = self.tokens.ids(text)
            return self.images.turn([*self.tokens.begin(ids), *ids], self.images.of_row(cells))
        messages, images = self._read_prompt(cells)
        has_text = any(text_of(m.get("content")).strip() for m in messages if m["role"] != "system")
        if self.require_text and not has_text and not images:
            raise DataError(f"{EMPTY}: {cells.name('prompt')} has no text; there is nothing to answer")
        chat = self._chat_of(cells, shows_tools)
        chat.check(messages, row.source)
        return self.images.turn(self.tokens.ids(chat.text(messages, answer=True)), images)

    def _read_prompt(self, cells: Cells) -> tuple[list[dict[str, Any]], list[bytes]]:
        """The row's prompt as the chat template reads it, and its images."""
        return self.images.of_messages(self._prompt_messages(cells), cells)

    def _plain_prompt(self, cells: Cells, optional: bool = False) -> str:
        section, text = self.section, self._made_prompt(cells)
        if text is None:
            text = "" if optional and "prompt" not in cells else cells.text("prompt")
        system = self._system(cells)
        return (section.system or "") + (f"{system}\n\n" if system else "") + text

    def _made_prompt(self, cells: Cells) -> str | None:
        """The text that ``data.input_template`` produces; None if it is not set."""
        if (template := self.section.input_template) is None:
            return None
        return fill(template, {**cells.values, **cells.row.columns})

    def _prompt_messages(self, cells: Cells) -> list[Message]:
        if (text := self._made_prompt(cells)) is not None:
            return self._with_system([{"role": "user", "content": text}], cells, "prompt")
        field = next((f for f in ("messages", "chosen") if isinstance(cells.values.get(f), list)), None)
        if field is not None and "prompt" not in cells:
            messages = self._messages(cells, field)  # a conversation without its last answer
            prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            if not prompt:
                raise DataError(f"{cells.name(field)}: it holds the assistant's answer only, so there is no prompt")
            return prompt
        if isinstance(cells.value("prompt"), list):
            messages = self._messages(cells, "prompt")
        else:
            text = cells.text("prompt", TEXT_OR_MESSAGES)
            messages = self._with_system([{"role": "user", "content": text}], cells, "prompt")
        if messages[-1]["role"] == "assistant":
            raise DataError(
                f"{cells.name('prompt')}: a prompt must not end with an assistant message; that is the answer"
            )
        return messages

    def _messages(self, cells: Cells, field: str) -> list[Message]:
        return self._with_system(cells.messages(field), cells, field)

    def _with_system(self, messages: list[Message], cells: Cells, field: str) -> list[Message]:
        row_system = self._system(cells)
        if row_system is None and self.section.system is None:
            return messages
        if messages[0]["role"] == "system" or (row_system and self.section.system is not None):
            other, advice = "data.system is also set", "remove one of the two"
            if self.section.system is None:
                columns = cells.layout.columns
                name = next(f for f in ("messages", "prompt", "chosen") if f in columns)
                other = f"its {cells.name('system')} holds one too"
                advice += f", or set --data.{name} {columns[name]}, with which {cells.name('system')} is not read"
            raise DataError(f"{cells.name(field)}: the row has its own system message, but {other}; {advice}")
        return [{"role": "system", "content": row_system or self.section.system}, *messages]

    def _system(self, cells: Cells) -> str | None:
        """The row's system message; None if its layout has no column for it, or it is empty."""
        return (cells.values.get("system") and cells.text("system")) or None


_CACHED = 256


class RowTools:
    """A run's chat template for each list of tools in its rows."""

    def __init__(self, chat: ChatTemplate) -> None:
        self._chat = chat
        self._first: ChatTemplate | None = None
        self._templates: dict[str, ChatTemplate] = {}

    def template(self, tools: Tools) -> ChatTemplate:
        """The template as it shows ``tools``. Raises DataError: it does not show one of them, or the run file has tools
        too."""
        if not tools:
            return self._chat
        key = json.dumps(tools, ensure_ascii=False, default=str)
        if key not in self._templates:
            if self._first is None:
                self._first = self._chat.for_tools(tools)
            chat = self._first.with_tools(tools)
            _check(self._chat, self._first, tools)
            if len(self._templates) >= _CACHED:
                self._templates.clear()
            self._templates[key] = chat
        return self._templates[key]


_QUESTION = [{"role": "user", "content": "x"}]


def _check(plain: ChatTemplate, chat: ChatTemplate, tools: Tools) -> None:
    """Raises DataError: the template refuses the tools, or leaves out one of them.

    Args:
        plain: the template without tools.
    """
    marked = chat.with_tools([_renamed(tool, mark(number)) for number, tool in enumerate(tools)])
    try:
        text = marked.text(_QUESTION, answer=True)
    except DataError as error:
        try:
            plain.text(_QUESTION, answer=True)
        except DataError:  # the template needs other messages; the error about the row says which
            return
        cause = error.__cause__ or error
        raise DataError(
            f"column {TOOLS!r}: the chat template refuses the tools: {type(cause).__name__}: {cause}. Many "
            "templates read a tool only as {type: function, function: {name, description, parameters}}, with a JSON "
            "schema as parameters: write the column in this form, or use another template (data.chat_template)"
        ) from error
    for number, tool in enumerate(tools):
        if mark(number) not in text and json.dumps(mark(number))[1:-1] not in text:
            raise DataError(
                f"column {TOOLS!r}: the chat template leaves out the tool {tool.get('function', tool)['name']!r}, so "
                "the policy would not see it. Use a template that writes tools (data.chat_template), or remove the "
                "column"
            )


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "function" in tool:
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}
