"""A tokenizer's chat template, applied with fixed keyword arguments and at a fixed time."""

from __future__ import annotations

import copy
import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import Environment, TemplateSyntaxError, meta
from rlhf.errors import ConfigError, DataError, did_you_mean

from rlhf_runtime.data.messages import as_api_writes
from rlhf_runtime.data.row_fields import Message
from rlhf_runtime.data.text_tokens import Span

T = TypeVar("T")
_NOT_OF_TEMPLATES = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "max_length", "messages",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "truncation",
    }
)  # fmt: skip
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_GENERATION_TAGS = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
_CLOCK = "strftime_now"
"""The function with which templates read the clock."""
_day: ContextVar[datetime | None] = ContextVar("day", default=None)
"""The time of the render in progress."""


def _strftime(pattern: str) -> str:
    """The clock of a compiled template. Other users of the template in this process keep theirs."""
    return (_day.get() or datetime.now()).strftime(pattern)


class TemplateRender:
    """Renders messages. Raises ConfigError: the template does not read a keyword argument, writes no messages, or
    exceeds limits (:func:`try_template`).

    Args:
        day: the time that the template reads as now.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], day: datetime) -> None:
        self._tokenizer, self.kwargs, self.day = tokenizer, dict(kwargs), day
        self._parts_only = False
        """Whether the template reads content only as a list of parts, like the templates of some image-text models."""
        try_template(str(tokenizer.chat_template), self._try)
        self.variables = _variables(tokenizer.chat_template)
        """The names that the template reads."""
        self.dated = _CLOCK in self.variables
        """Whether the template reads the clock."""
        self._check_kwargs()
        self._source: str = tokenizer.get_chat_template(tools=kwargs.get("tools"))
        self.has_generation = _GENERATION.search(self._source) is not None
        """Whether the template marks answers."""
        self._require_content()

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TemplateRender:
        """A copy that shows other tools."""
        other = copy.copy(self)
        other.kwargs = {**self.kwargs, "tools": [dict(tool) for tool in tools]}
        return other

    def text(self, messages: Sequence[Message], answer: bool) -> str:
        """One render. Raises DataError with the template's message.

        Args:
            answer: whether to add the generation prompt.
        """

        def apply(conversation: list[dict[str, Any]]) -> str:
            text: str = self._tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=answer, **self.kwargs
            )
            return text

        return self._applied(messages, apply, self._tokenizer.get_chat_template(tools=self.kwargs.get("tools")))

    def marked_by_template(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The render, and the span of characters of each ``{% generation %}`` block. Raises DataError, as
        :meth:`text`."""
        from transformers.utils.chat_template_utils import render_jinja_template

        def apply(conversation: list[dict[str, Any]]) -> tuple[str, list[Span]]:
            rendered: Any = render_jinja_template(
                [conversation], chat_template=self._source, return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self.kwargs},
            )  # fmt: skip
            texts, spans = rendered
            return texts[0], [(int(start), int(end)) for start, end in spans[0]]

        return self._applied(messages, apply, self._source)

    # ----------------------------------------------------- one render, and checks of the template

    def _applied(self, messages: Sequence[Message], apply: Callable[[list[dict[str, Any]]], T], source: str) -> T:
        """The render of the messages. Some templates read the arguments of calls as JSON text only."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        token = _day.set(self.day)
        try:
            # from version 5.22 transformers passes no function among the keyword arguments
            _compile_jinja_template(source).globals[_CLOCK] = _strftime
            return apply(self._as_read(messages))
        except Exception as error:  # jinja2 errors, and any error of a template
            if any(message.get("tool_calls") for message in messages):
                with suppress(Exception):
                    return apply(as_api_writes(self._as_read(messages)))
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise DataError(
                f"the chat template refuses the messages ({roles}): {type(error).__name__}: {error}; change the "
                "messages, or set data.chat_template to a template that accepts them"
            ) from error
        finally:
            _day.reset(token)

    def _as_read(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages with content in the form that the template reads."""
        if not self._parts_only:
            return [dict(m) for m in messages]
        parts = ([{"type": "text", "text": c}] if isinstance(c := m.get("content"), str) else c for m in messages)
        return [{**m, "content": content} for m, content in zip(messages, parts, strict=True)]

    def _try(self, messages: Sequence[Message]) -> str:
        """Look up names and render, as this process will do later. jinja2 computes constants when it looks up names."""
        _variables(self._tokenizer.chat_template)
        return self.text(messages, answer=True)

    def _check_kwargs(self) -> None:
        if reserved := sorted(_NOT_OF_TEMPLATES & set(self.kwargs)):
            raise ConfigError(
                f"data.template_kwargs: {', '.join(reserved)} cannot be set, because the way in which the template is "
                "applied is fixed; allowed are variables that the template itself reads (enable_thinking, tools, ...)."
            )
        names = sorted(self.variables - _NOT_OF_TEMPLATES - {"raise_exception", _CLOCK})
        for name in self.kwargs:
            if name not in names:
                raise ConfigError(
                    f"data.template_kwargs: the chat template does not read {name!r}, so it would have no effect. It "
                    f"reads: {', '.join(names) or 'no variables'}.{did_you_mean(name, names)} Correct or remove it."
                )

    def _require_content(self) -> None:
        """Raises ConfigError if the template writes the same text for every user message."""
        questions = [[{"role": "user", "content": content}] for content in ("one", "two")]
        try:
            first, second = (self.text(messages, answer=True) for messages in questions)
        except DataError:  # the template needs other messages; an error about a row will say which
            return
        if first == second:
            self._parts_only = True
            with suppress(DataError):  # the template reads no parts either
                first, second = (self.text(messages, answer=True) for messages in questions)
        if first == second:
            raise ConfigError(
                f"the chat template writes {first[:60]!r} for every user message, so every row would have the same "
                "prompt. Use a template that writes messages: see data.chat_template."
            )


def _variables(templates: str | Mapping[str, str]) -> frozenset[str]:
    """The variables that a tokenizer's chat template reads. If it has several templates, the variables of all of them.
    Raises ConfigError: a template is not valid."""
    sources = [templates] if isinstance(templates, str) else templates.values()
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    names = set[str]()
    for source in sources:
        try:
            # The tags are an extension of transformers. As comments they keep their control of white space.
            tree = environment.parse(_GENERATION_TAGS.sub(r"{#\1 \2#}", source))
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}. Correct it, or set "
                "data.chat_template to a file with another template."
            ) from error
        names |= meta.find_undeclared_variables(tree)
    return frozenset(names)


SECONDS = 10
"""Seconds of processor time, which do not depend on other load of the machine."""
MEMORY = 2**30
LENGTH = 10_000_000
"""Largest number of characters that a template may write for a short conversation."""
_PATIENCE = 120.0
"""Seconds of waiting for the child process, if the machine gives it no time to compute."""
_TOO_MUCH_MEMORY, _TOO_LONG = 3, 4
_USER, _ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
CONVERSATIONS: Sequence[Sequence[Mapping[str, Any]]] = (
    [_USER],
    [{"role": "system", "content": "Add."}, _USER],
    [_USER, _ANSWER, _USER],
)
_passed: set[str] = set()
"""Sources of templates that were tried in this process."""


def try_template(source: str, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
    """Render a short conversation for the first time, in a child process with limits. Raises ConfigError if the
    template exceeds a limit. Other errors of the template are left to later renders.

    A template is a program that comes with a model. The sandbox of jinja2 keeps it from files and from the interpreter,
    and limits a single range to 100,000. It limits neither nested loops nor the size of texts, which jinja2 computes
    even while it compiles. This check detects a template that is always wrong or hostile, not one that is so only for
    certain rows.

    Args:
        source: the template's text.
        render: renders a conversation with it; raises DataError.
    """
    if source in _passed:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about a fork while threads run: the child only renders
        child = os.fork()
    if child == 0:
        _child(render)
    status = _wait(child)
    code = os.waitstatus_to_exitcode(status)
    problem = {
        _TOO_MUCH_MEMORY: f"needs more than {MEMORY // 2**20} MiB of memory",
        _TOO_LONG: f"writes more than {LENGTH:,} characters",
        -signal.SIGXCPU: f"computes for more than {SECONDS} s",
        -signal.SIGKILL: f"does not end within {SECONDS} s, or needs more memory than there is",
    }.get(code)
    if problem is not None:
        raise ConfigError(
            f"the chat template {problem} for a conversation of three words, so it is not used. Use the template that "
            "the model was published with, or set data.chat_template to a file with another template."
        )
    _passed.add(source)


def _child(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
    """Render the conversations under the limits, and end the process."""
    code = 0
    try:
        # The child inherits the handlers of its parent.
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # SIGXCPU at the first limit. SIGKILL at the second, if the first did not end the process.
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        statm = Path("/proc/self/statm")
        if statm.exists():  # the address space so far is that of the parent process
            limit = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for messages in CONVERSATIONS:
            try:
                code = _TOO_LONG if len(render(messages)) > LENGTH else code
            except DataError as error:
                code = _TOO_MUCH_MEMORY if isinstance(error.__cause__, MemoryError) else code
    except MemoryError:
        code = _TOO_MUCH_MEMORY
    finally:
        os._exit(code)


def _wait(child: int) -> int:
    """The exit status of the child, which is killed if it does not end."""
    deadline, pause = time.monotonic() + _PATIENCE, 0.001
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return status[1]
