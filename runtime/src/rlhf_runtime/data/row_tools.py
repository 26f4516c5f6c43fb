"""Chat templates that show the tools of single rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.errors import DataError

from rlhf_runtime.data.conversation import ChatTemplate
from rlhf_runtime.data.layouts import TOOLS
from rlhf_runtime.data.template_markers import mark

Tools = Sequence[Mapping[str, Any]]
_CACHED = 256


class RowTools:
    """A run's chat template, once for each list of tools in its rows."""

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
            _check(self._first, tools)
            if len(self._templates) >= _CACHED:
                self._templates.clear()
            self._templates[key] = chat
        return self._templates[key]


def _check(chat: ChatTemplate, tools: Tools) -> None:
    """Raises DataError: the template leaves out a tool."""
    marked = chat.with_tools([_renamed(tool, mark(number)) for number, tool in enumerate(tools)])
    try:
        text = marked.text([{"role": "user", "content": "x"}], answer=True)
    except DataError:  # it needs other messages; the error about the row says which
        return
    for number, tool in enumerate(tools):
        if mark(number) not in text and json.dumps(mark(number))[1:-1] not in text:
            raise DataError(
                f"column {TOOLS!r}: the chat template leaves out the tool {tool.get('function', tool)['name']!r}, so "
                "the policy would not know of it. Use a template that writes tools (data.chat_template), or take the "
                "column out"
            )


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    if "function" in tool:
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}
