"""Forms of calls that are learned from a chat template."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rlhf.errors import DataError
from rlhf.types import Turn
from rlhf_runtime.data import chat_messages
from rlhf_runtime.data.call_forms import argument_types, read_calls
from rlhf_runtime.data.learned_calls import learned_form

from runtime.tests.data.call_templates import (
    ADD,
    FORMS,
    JSON,
    VALUE,
    arguments,
    calls_of,
    each,
    elements,
    parsed,
    within,
    written,
)


def test_values_within_objects_and_lists_are_read_by_their_schema(template_of) -> None:
    template = template_of(*FORMS["minimax m3"])
    code = {"type": "object", "properties": {"code": {"type": "string"}}}
    schema = {"type": "object", "properties": {"places": {"type": "array", "items": code}, "one": {"type": "array"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    values = {"places": [{"code": "10"}, {"code": "true"}], "one": [1]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": values}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = template.chat.with_tools([tool]).text(messages, False).rpartition("<|assistant|>")[2]
    answer = template.messages.answers.parse(Turn(template.tokens.ids(text), True), [], (0, 0, 0), [tool])
    assert calls_of(answer) == [("add", values)]


@pytest.mark.parametrize(
    ("calls", "special", "message"),
    [
        (elements("<call=NAME>", "<part=KEY>", "{{ v | string | e }}"), (), "tools would never be called"),
        (elements("<call=NAME>", "<part=KEY>", "{{ v | string | replace('70', '71') }}"), (), "never be called"),
        (each("[{{ f.name }}]" + JSON), (), "tools would never be called"),
        (
            within("<|to|>tool<|say|>", each("<call={{ f.name }}>" + JSON + "</call>"), "") + "<|say|>",
            ("<|to|>", "<|say|>"),
            "writes '<|say|>' in calls and in the answer",
        ),
        (
            each("<call={{ f.name }}>" + arguments("<{{ k }}>" + VALUE + "</{{ k }}>{{ '' if loop.last else ', ' }}")),
            (),
            "tools would never be called",
        ),
        ("<eos>" + each("<call={{ f.name }}>" + JSON + "</call>"), (), "the end token '<eos>' before a call"),
    ],
    ids=[
        "another text",
        "another number",
        "no tag",
        "a token of answers",
        "a separator after the key",
        "after the end token",
    ],
)
def test_a_form_that_cannot_be_told_or_read_is_refused(template_of, calls: str, special: tuple, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        template_of(calls, special).messages.answers.check_tools()


@pytest.mark.parametrize("models", FORMS)
def test_patterns_of_learned_forms_take_linear_time(template_of, models: str) -> None:
    """A pattern that begins with white space is tried at each place of a run of white space, up to its end: 200 kB took
    minutes. Neither may a run be divided between two patterns."""
    form = template_of(*FORMS[models]).messages.answers._learned
    for pattern in [form.opening, form.closing, *form.trace.split("|")] if form else []:
        assert re.match(r"(?:\(\?:)*\\s", pattern) is None, pattern
        assert r"\s*\s*" not in pattern


@pytest.mark.parametrize("models", ["qwen3-coder", "glm 4.5", "minimax m3", "types of values in attributes"])
def test_repeated_tags_and_white_space_in_a_learned_form_are_read_in_linear_time(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    forms = template.messages.answers._forms
    text = written(template, models).removesuffix("<eos>").partition("7")[0]
    for tag in ("<", "\n", "<tool_call>", "<function=", text.partition("a")[2][:40]):
        assert read_calls(text + tag * 20_000, forms, {})[1] == []


STRINGS = (
    "",
    " x ",
    "\n\nx\n\n",
    "10",
    "None",
    "</b>",
    "<![CDATA[x]]>",
    "]]>",
    '{"a": 1}',
    "</zq>",
    "\u2028é ~",
    "'s'",
)


@pytest.mark.parametrize(
    "models", [m for m in FORMS if not any(word in m for word in ("one", "lfm2", "olmo", "minicpm3", "kimi"))]
)
def test_strings_are_read_as_they_are(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    forms = template.messages.answers._forms
    for text in STRINGS:
        calls = [("add", {"note": text})]
        answer = template.messages.answers._render("", calls)
        result = read_calls(answer, forms, argument_types([ADD]))[1]
        assert [(call.name, json.loads(call.arguments)) for call in result] == calls


@pytest.mark.parametrize(("kind", "value"), [("array", []), ("object", {}), ("string", "")])
def test_a_value_for_which_the_template_writes_nothing_is_read_by_its_type(template_of, kind: str, value: Any) -> None:
    """MiniMax M3 writes nothing for each of the three."""
    template = template_of(*FORMS["minimax m3"])
    text = template.messages.answers._render("", [("add", {"a": value})])
    [call] = read_calls(text, template.messages.answers._forms, {("add", "a"): frozenset([kind])})[1]
    assert json.loads(call.arguments) == {"a": value}


def test_a_form_is_learned_once_for_a_tokenizer(template_of, monkeypatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(chat_messages, "learned_form", lambda write: calls.append(write) or learned_form(write))
    calls_template, special = FORMS["glm 4.5"]
    template = template_of(calls_template + "{# used by no other test #}", special)
    template.messages.answers.check_tools()
    for _ in range(3):
        assert calls_of(parsed(template, written(template, "glm 4.5")))
    assert len(calls) == 1
