"""Calls in the forms of published chat templates. The templates here are our own: of the published ones they have only
how a call is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rlhf.errors import DataError
from rlhf.types import Turn
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data import chat_messages
from rlhf_runtime.data.template import Template
from rlhf_testing.tiny import tiny_tokenizer

EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}BODY{% endfor %}"
"""All calls of a message."""
TAGGED_JSON = (
    """{{ '<tool_call>{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}</tool_call>' }}"""
)
OBJECT = """{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}' }}"""
VALUE = "{{ v if v is string else v | tojson }}"
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes, qwen 2.5 and 3, smollm3, granite 4": (EACH.replace("BODY", TAGGED_JSON), ()),
    "qwen3-coder": (
        EACH.replace(
            "BODY",
            "{{ '\\n<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments.items() %}"
            "{{ '<parameter=' + k + '>\\n' }}" + VALUE + "{{ '\\n</parameter>\\n' }}{% endfor %}"
            "{{ '</function>\\n</tool_call>' }}",
        ),
        (),
    ),
    "glm 4.5": (
        EACH.replace(
            "BODY",
            "{{ '\\n<tool_call>' + f.name + '\\n' }}{% for k, v in f.arguments.items() %}"
            "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}" + VALUE + "{{ '</arg_value>\\n' }}{% endfor %}"
            "{{ '</tool_call>' }}",
        ),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama 3.1 and 3.2": (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        """{{ '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}{% endif %}""",
        ("<|python_tag|>",),
    ),
    "mistral": (
        "{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}"
        + EACH.replace("BODY", OBJECT + "{{ '' if loop.last else ', ' }}")
        + "{{ ']' }}{% endif %}",
        ("[TOOL_CALLS]",),
    ),
    "mistral, later ones": (
        EACH.replace("BODY", "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson) }}"),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    "granite 3, phi-4-mini": (
        "{% if m.tool_calls %}{{ '<|tool_call|>[' }}"
        + EACH.replace("BODY", OBJECT + "{{ '' if loop.last else ', ' }}")
        + "{{ ']<|/tool_call|>' }}{% endif %}",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "deepseek v3": (
        "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
        + EACH.replace(
            "BODY",
            "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + (f.arguments | tojson) }}"
            "{{ '\\n```<｜tool▁call▁end｜>' }}",
        )
        + "{{ '<｜tool▁calls▁end｜>' }}{% endif %}",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek v3.1": (
        "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
        + EACH.replace(
            "BODY",
            "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + (f.arguments | tojson) }}"
            "{{ '<｜tool▁call▁end｜>' }}",
        )
        + "{{ '<｜tool▁calls▁end｜>' }}{% endif %}",
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
}
"""{models: (how their templates write the calls of the message ``m``, their tokens that are called special)}."""
REFUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "gpt-oss": (
        EACH.replace(
            "BODY",
            "{{ '<|channel|>commentary to=functions.' + f.name + ' <|constrain|>json<|message|>' }}"
            "{{ (f.arguments | tojson) + '<|call|>' }}",
        ),
        ("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    ),
    "kimi k2": (
        "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}"
        "{{ '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + (call.function.arguments | tojson) }}"
        "{{ '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "phi-4-mini as published": ("", ()),
}
"""Kimi's templates write the id of a call and not its name; Phi-4-mini's write no calls."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}, "unit": {"type": "string"}},
        },
    },
}
ARGUMENTS = {"a": 3, "b": None, "unit": "10"}


@pytest.fixture(scope="module")
def template_of(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def load(written: str, special: tuple[str, ...]) -> Template:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = (
            "{% if tools %}{{ (tools | tojson) + '<eos>' }}{% endif %}{% for m in messages %}"
            "{{ '<|' + m.role + '|>' + m.content }}" + written + "{{ '<eos>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )
        return Template(tokenizer, DataSection())

    return load


def parsed(template: Template, text: str) -> dict[str, Any]:
    return template.parse_answer(Turn(template.tokens.ids(text), True), [], (0, 0, 0), [ADD])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


@pytest.mark.parametrize("models", FORMS)
def test_calls_are_read_as_a_template_of_these_models_writes_them(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    template.check_tools()
    count = 1 if "llama" in models else 2
    calls = [{"id": "", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}] * count
    content = "" if "llama" in models else "Let me add."
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    whole = template.chat.text([{"role": "user", "content": "?"}, message], False, [ADD])
    written = whole.rpartition("<|assistant|>")[2]
    answer = parsed(template, written)
    assert calls_of(answer) == [("add", ARGUMENTS)] * count
    assert answer["content"] == content
    assert calls_of(parsed(template, "I would call add.<eos>")) == []


@pytest.mark.parametrize("models", REFUSED)
def test_templates_whose_calls_cannot_be_read_are_refused(template_of, models: str) -> None:
    with pytest.raises(DataError, match="tools would never be called"):
        template_of(*REFUSED[models]).check_tools()


def test_a_call_after_the_tag_of_python_and_an_answer_in_json(template_of) -> None:
    template = template_of(*FORMS["llama 3.1 and 3.2"])
    call = json.dumps({"name": "add", "parameters": ARGUMENTS})
    assert calls_of(parsed(template, f"<|python_tag|>{call}<eos>")) == [("add", ARGUMENTS)]
    for text in ('{"name": "Ada", "born": 1815}', f"So: {call}", f"{call} {call}", '{"name": "add", "parameters": 3}'):
        assert parsed(template, f"{text}<eos>") == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("models", "text"),
    [
        ("qwen3-coder", "<tool_call><function=></function></tool_call>"),
        ("mistral", "[TOOL_CALLS] [3]"),
        ("mistral, later ones", "[TOOL_CALLS]add[ARGS]3"),
        ("granite 3, phi-4-mini", "<|tool_call|>add"),
        ("deepseek v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n3\n```<｜tool▁call▁end｜>"),
        ("deepseek v3.1", "<｜tool▁call▁begin｜>"),
    ],
)
def test_what_is_no_call_stays_in_the_text(template_of, models: str, text: str) -> None:
    assert parsed(template_of(*FORMS[models]), f"{text}<eos>") == {"role": "assistant", "content": text}


def test_a_value_that_is_text_is_read_by_the_schema_of_its_argument(template_of) -> None:
    template = template_of(*FORMS["qwen3-coder"])
    body = "".join(
        f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in (("a", "x y"), ("unit", '{"m": 1}'), ("c", "[1]"))
    )
    answer = parsed(template, f"<tool_call>\n<function=add>\n{body}</function>\n</tool_call><eos>")
    assert calls_of(answer) == [("add", {"a": "x y", "unit": '{"m": 1}', "c": [1]})]


@pytest.mark.parametrize("tag", ["<parameter=a>", "<parameter=", "<arg_key>", "<arg_key>a</arg_key>\n<arg_value>"])
@pytest.mark.parametrize("before", ["<tool_call>", "<tool_call><function=f>"])
def test_repeated_tags_are_read_in_linear_time(tag, before):
    """200,000 tags: a pattern that searches to the end from each of them takes hours."""
    text = before + tag * 200_000
    assert chat_messages.read_calls(text, chat_messages.FORMS, {})[0] in ("", text)
