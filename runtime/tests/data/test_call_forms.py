"""Calls in the forms of published chat templates. The templates here are our own: of the published ones they have only
how a call is written."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from rlhf.errors import DataError
from rlhf.types import Turn
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.call_forms import FORMS as FORMS_READ
from rlhf_runtime.data.call_forms import argument_types, read_calls, read_channels
from rlhf_runtime.data.template import Template
from rlhf_testing.tiny import tiny_tokenizer

EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}BODY{% endfor %}"
"""All calls of a message."""
VALUE = "{{ v if v is string else v | tojson }}"
JSON = "{{ f.arguments | tojson }}"
OBJECT = """{{ '{"name": "' + f.name + '", "arguments": ' }}""" + JSON + "}"
TAGS_OF_DEEPSEEK = tuple(f"<｜tool▁{tag}｜>" for tag in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end"))
TAGS_OF_KIMI = tuple(
    f"<|tool_{tag}|>"
    for tag in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)
TAGS_OF_GPT_OSS = tuple(f"<|{tag}|>" for tag in ("start", "channel", "constrain", "message", "end", "call", "return"))


def each(call: str, separator: str = "") -> str:
    return EACH.replace("BODY", call + "{% if not loop.last %}" + separator + "{% endif %}")


def within(opening: str, calls: str, closing: str) -> str:
    return "{% if m.tool_calls %}" + opening + calls + closing + "{% endif %}"


def elements(function: str, parameter: str, value: str = VALUE) -> str:
    """``NAME`` and ``KEY`` in the opening tags; the closing tags have no attributes."""
    head, key = ("</" + tag[1:].partition("=")[0].partition(" ")[0] + ">" for tag in (function, parameter))
    body = parameter.replace("KEY", "{{ k }}") + value + key
    return each(function.replace("NAME", "{{ f.name }}") + arguments(body) + head)


def arguments(body: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + body + "{% endfor %}"


QUOTED = (
    "{% macro q(v) %}{% if v is string %}QvQ{% elif v is mapping %}{{ '{' }}{% for k, x in v.items() %}"
    "{{ k }}:{{ q(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}[{% for x in v %}{{ q(x) }}{{ '' if loop.last else ',' }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
NS = "]<]minimax[>["
NESTED = (
    "{% macro x(v) %}{% if v is string %}{{ v }}{% elif v is mapping %}{% for k, y in v.items() %}"
    + f"{NS}<{{{{ k }}}}>{{{{ x(y) }}}}{NS}</{{{{ k }}}}>"
    + "{% endfor %}{% elif v is iterable %}{% for y in v %}"
    + f"{NS}<item>{{{{ x(y) }}}}{NS}</item>"
    + "{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
PYTHON = "{{ f.name }}(" + arguments("{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}") + ")"
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes, qwen 2.5 and 3, smollm3, granite 4": (each("<tool_call>" + OBJECT + "</tool_call>"), ()),
    "falcon 3": (within("<tool_call>", "{{ m.tool_calls | tojson }}", "</tool_call>"), ()),
    "qwen3-coder": (
        within(
            "<tool_call>",
            elements("<function=NAME>", "<parameter=KEY>", "{{ BR }}" + VALUE + "{{ BR }}"),
            "</tool_call>",
        ),
        (),
    ),
    "glm 4.5": (
        each(
            "<tool_call>{{ f.name }}{{ BR }}"
            + arguments("<arg_key>{{ k }}</arg_key>{{ BR }}<arg_value>" + VALUE + "</arg_value>{{ BR }}")
            + "</tool_call>"
        ),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama 3.1 and 3.2, one": (
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        """{{ '{"name": "' + f.name + '", "parameters": ' + (f.arguments | tojson) + '}' }}{% endif %}""",
        ("<|python_tag|>",),
    ),
    "llama 4": (
        within("<|python_end|>", each(OBJECT.replace("arguments", "parameters", 1)), ""),
        ("<|python_start|>", "<|python_end|>"),
    ),
    "functionary 3.1": ("{# <|eom_id|> #}" + each("<function={{ f.name }}>" + JSON + "</function>"), ()),
    "mistral": (within("[TOOL_CALLS] [", each(OBJECT, ", "), "]"), ("[TOOL_CALLS]",)),
    "mistral, later ones": (each("[TOOL_CALLS]{{ f.name }}[ARGS]" + JSON), ("[TOOL_CALLS]", "[ARGS]")),
    "mistral small 3.2, magistral": (
        each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]" + JSON),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    ),
    "granite 3, phi-4-mini": (
        within("<|tool_call|>[", each(OBJECT, ", "), "]<|/tool_call|>"),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "deepseek v3": (
        within(
            TAGS_OF_DEEPSEEK[0],
            each(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}{{ BR }}```json{{ BR }}"
                + JSON
                + "{{ BR }}```<｜tool▁call▁end｜>"
            ),
            TAGS_OF_DEEPSEEK[-1],
        ),
        TAGS_OF_DEEPSEEK,
    ),
    "deepseek v3.1": (
        within(
            TAGS_OF_DEEPSEEK[0],
            each("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>"),
            TAGS_OF_DEEPSEEK[-1],
        ),
        TAGS_OF_DEEPSEEK,
    ),
    "deepseek v3.2": (
        within(
            "<｜DSML｜function_calls>{{ BR }}",
            elements(
                '<｜DSML｜invoke name="NAME">',
                """<｜DSML｜parameter name="KEY" string="{{ 'true' if v is string else 'false' }}">""",
            ),
            "{{ BR }}</｜DSML｜function_calls>",
        ),
        ("｜DSML｜",),
    ),
    "kimi k2": (
        within(
            TAGS_OF_KIMI[0],
            each("<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + JSON + "<|tool_call_end|>"),
            TAGS_OF_KIMI[-1],
        ),
        TAGS_OF_KIMI,
    ),
    "gpt-oss, one": (
        each(" to=functions.{{ f.name }}<|channel|>commentary <|constrain|>json<|message|>" + JSON + "<|call|>"),
        TAGS_OF_GPT_OSS,
    ),
    "gemma 4": (
        QUOTED.replace("QvQ", """<|"|>{{ v }}<|"|>""")
        + each("<|tool_call>call:{{ f.name }}{{ q(f.arguments) }}<tool_call|>"),
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "functiongemma": (
        QUOTED.replace("QvQ", "<escape>{{ v }}<escape>")
        + each("<start_function_call>call:{{ f.name }}{{ q(f.arguments) }}<end_function_call>"),
        (),
    ),
    "minimax m2": (
        within(
            "<minimax:tool_call>{{ BR }}",
            elements('<invoke name="NAME">', '<parameter name="KEY">'),
            "{{ BR }}</minimax:tool_call>",
        ),
        (),
    ),
    "minimax m3": (
        NESTED
        + within(
            NS + "<tool_call>{{ BR }}",
            each(
                NS
                + '<invoke name="{{ f.name }}">'
                + arguments(f"{NS}<{{{{ k }}}}>{{{{ x(v) }}}}{NS}</{{{{ k }}}}>")
                + NS
                + "</invoke>{{ BR }}"
            ),
            NS + "</tool_call>",
        ),
        (NS,),
    ),
    "hunyuan 3": (
        within(
            "<tool_calls:opensource>{{ BR }}",
            each(
                "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>{{ BR }}"
                + arguments(
                    "<arg_key:opensource>{{ k }}</arg_key:opensource>{{ BR }}<arg_value:opensource>"
                    + VALUE
                    + "</arg_value:opensource>{{ BR }}"
                )
                + "</tool_call:opensource>{{ BR }}"
            ),
            "</tool_calls:opensource>",
        ),
        ("<tool_sep:opensource>", "<arg_key:opensource>", "</arg_key:opensource>"),
    ),
    "types of values in attributes": (
        within(
            "<|open|>tools<|sep|>",
            each(
                '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
                + arguments(
                    '<|open|>argument key="{{ k }}" type="'
                    "{{ 'string' if v is string else 'null' if v is none else 'object' if v is mapping else 'number' }}"
                    '"<|sep|>' + VALUE + "<|close|>argument<|sep|>"
                )
                + "<|close|>call<|sep|>"
            ),
            "<|close|>tools<|sep|>",
        ),
        ("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "solar open": (
        within(
            "<|tool_calls|>",
            each("<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ f.name }}<|tool_call:args|>" + JSON).replace(
                "{% endfor %}", "<|tool_call:end|>{% endfor %}"
            ),
            "<|calls|>",
        ),
        tuple(f"<|{tag}|>" for tag in ("tool_calls", "tool_call:begin", "tool_call:name", "tool_call:args", "calls")),
    ),
    "seed-oss": (
        within("<seed:tool_call>{{ BR }}", elements("<function=NAME>", "<parameter=KEY>"), "{{ BR }}</seed:tool_call>"),
        (),
    ),
    "step-3": (
        within(
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>function<｜tool_sep｜>"
            + elements('<steptml:invoke name="NAME">', '<steptml:parameter name="KEY">')
            + "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
        (
            "<｜tool_calls_begin｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_sep｜>",
            "<｜tool_call_end｜>",
            "<｜tool_calls_end｜>",
        ),
    ),
    "minicpm5": (elements('<function name="NAME">', '<param name="KEY">', f"<![CDATA[{VALUE}]]>"), ()),
    "minicpm3": (
        within(
            "<|tool_call_start|>{{ BR }}```python{{ BR }}",
            each(PYTHON, "{{ BR }}"),
            "{{ BR }}```{{ BR }}<|tool_call_end|>",
        ),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "lfm2": (
        within("<|tool_call_start|>[", each(PYTHON, ", "), "]<|tool_call_end|>"),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo 3": (within("<function_calls>{{ BR }}", each(PYTHON, "{{ BR }}"), "{{ BR }}</function_calls>"), ()),
    "command a": (
        within(
            "<|START_ACTION|>[",
            each("""{"tool_call_id": "0", "tool_name": "{{ f.name }}", "parameters": """ + JSON + "}", ",{{ BR }}"),
            "]<|END_ACTION|>",
        ),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "hunyuan, jamba, apriel": (within("<tool_calls>[", each(OBJECT, ", "), "]</tool_calls>"), ()),
    "minimax m1": (within("<tool_calls>{{ BR }}", each(OBJECT, "{{ BR }}"), "{{ BR }}</tool_calls>"), ()),
    "nemotron nano 2": (within("<TOOLCALL>[", each(OBJECT, ", "), "]</TOOLCALL>"), ()),
    "internlm 2": (
        each("<|action_start|><|plugin|>{{ BR }}" + OBJECT + "<|action_end|>"),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    "apertus": (
        within("<|tools_prefix|>[", each("""{"{{ f.name }}": """ + JSON + "}", ", "), "]<|tools_suffix|>"),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "gigachat 3.1, one": (each("<|function_call|>" + OBJECT), ("<|function_call|>",)),
    "xlam, alone": ("""{# [{"name": "tool_call_name" #}""" + within("[", each(OBJECT, ", "), "]"), ()),
}
"""{models: (how templates write the calls of the message ``m``, their tokens that are called special)}. "one": one call
and no content before it; "alone": no content."""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": ["number", "null"]},
                "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "note": {"type": "string"},
                "options": {"$ref": "#/$defs/Options"},
            },
            "$defs": {"Options": {"type": "object"}},
        },
    },
}
ARGUMENTS = {"a": 3, "b": None, "unit": "10", "note": '7 "e"\n<b> \\d', "options": {"x": [1.5, {"y": True}], "z": "t"}}


@pytest.fixture(scope="module")
def template_of(tmp_path_factory):
    from transformers import AutoTokenizer

    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def load(written: str, special: tuple[str, ...]) -> Template:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
        tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
        tokenizer.chat_template = (
            "{% set BR = '\\n' %}{% if tools %}{{ (tools | tojson) + '<eos>' }}{% endif %}{% for m in messages %}"
            "{{ '<|' + m.role + '|>' + m.content }}" + written + "{{ '<eos>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        )
        return Template(tokenizer, DataSection())

    return load


def parsed(template: Template, text: str) -> dict[str, Any]:
    return template.parse_answer(Turn(template.tokens.ids(text), True), [], (0, 0, 0), [ADD])


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", ())]


def count(models: str) -> int:
    return 1 if "one" in models else 2


def written(template: Template, models: str) -> str:
    """An answer with calls, as the template writes it."""
    calls = [
        {"id": f"functions.add:{n}", "type": "function", "function": {"name": "add", "arguments": ARGUMENTS}}
        for n in range(count(models))
    ]
    content = "" if "one" in models or "alone" in models else "Wait."
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    whole = template.chat.text([{"role": "user", "content": "?"}, message], False, [ADD])
    return whole.rpartition("<|assistant|>")[2]


@pytest.mark.parametrize("models", FORMS)
def test_calls_are_read_as_a_template_of_these_models_writes_them(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    template.check_tools()
    text = written(template, models)
    answer = parsed(template, text)
    assert calls_of(answer) == [("add", ARGUMENTS)] * count(models)
    assert answer["content"] == ("Wait." if "Wait." in text else "")
    assert len({call["id"] for call in answer["tool_calls"]}) == len(answer["tool_calls"])
    assert calls_of(parsed(template, "I would call add.<eos>")) == []


@pytest.mark.parametrize("models", FORMS)
def test_a_call_that_is_cut_off_is_never_read_with_other_arguments(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    text = written(template, models).removesuffix("<eos>")
    forms = template._parsed_answers._forms
    for end in range(len(text)):
        content, calls = read_calls(text[:end], forms, argument_types([ADD]))
        if "gpt-oss" in models:
            content, _, calls = read_channels(text[:end])
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", ARGUMENTS)] * len(calls)
        assert calls or content == text[:end], "what is no call stays in the text"


@pytest.mark.parametrize("models", FORMS)
def test_a_call_that_cannot_be_read_is_noticed(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    whole = written(template, models)
    assert not template.has_unread_call(parsed(template, whole))
    answer = parsed(template, whole[: whole.rindex("7")])
    assert template.has_unread_call(answer), answer
    assert not template.has_unread_call(parsed(template, "I would call add.<eos>"))


@pytest.mark.parametrize("calls", ["", "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"])
def test_templates_whose_calls_cannot_be_read_are_refused(template_of, calls: str) -> None:
    """Phi-4-mini's template, as published, writes no calls."""
    with pytest.raises(DataError, match="tools would never be called"):
        template_of(calls, ()).check_tools()


@pytest.mark.parametrize(
    ("models", "text", "ids"),
    [
        (
            "kimi k2",
            "<|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "functions.add:7",
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]', "a1b2c3d4e"),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "call_1"}]', None),
        ("mistral small 3.2, magistral", "[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{}", "a1b2c3d4e"),
        ("mistral small 3.2, magistral", "[TOOL_CALLS]add[CALL_ID]1[ARGS]{}", None),
    ],
)
def test_a_call_keeps_the_id_that_the_policy_wrote_if_the_template_takes_it(template_of, models, text, ids) -> None:
    """Results name it. Mistral's templates refuse ids of another length than nine."""
    (call,) = parsed(template_of(*FORMS[models]), f"{text}<eos>")["tool_calls"]
    assert call["id"] == ids or (ids is None and len(call["id"]) == 9 and call["id"] not in text)


def test_channels_of_gpt_oss(template_of) -> None:
    template = template_of(*FORMS["gpt-oss, one"])
    thought = "<|channel|>analysis<|message|>Sum it.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    preamble = "<|channel|>commentary<|message|>I will add.<|end|><|start|>assistant"
    answer = parsed(template, thought + preamble + call)
    assert (answer["content"], answer["reasoning_content"]) == ("I will add.", "Sum it.")
    assert calls_of(answer) == [("add", {"a": 1})]
    answer = parsed(template, thought + "<|channel|>final<|message|>It is 3.<|return|>")
    assert answer == {"role": "assistant", "content": "It is 3.", "reasoning_content": "Sum it."}
    broken = call.replace("}", "")
    assert parsed(template, thought + broken)["content"] == "<|start|>assistant" + broken


@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<seed:think>", "</seed:think>"),
        ("[THINK]", "[/THINK]"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|channel>thought\n", "<channel|>"),
    ],
)
def test_reasoning_stands_between_the_tags_of_the_template(template_of, opening: str, closing: str) -> None:
    template = template_of("{# " + closing + " #}", (opening.removesuffix("thought\n"), closing))
    answer = parsed(template, f"{opening}Sum it.{closing}It is 3.<eos>")
    assert answer == {"role": "assistant", "content": "It is 3.", "reasoning_content": "Sum it."}


def test_a_call_after_the_tag_of_python_and_an_answer_in_json(template_of) -> None:
    template = template_of(*FORMS["llama 3.1 and 3.2, one"])
    call = json.dumps({"name": "add", "parameters": ARGUMENTS})
    for form in (f"<|python_tag|>{call}", call.replace("parameters", "arguments", 1)):
        assert calls_of(parsed(template, f"{form}<eos>")) == [("add", ARGUMENTS)]
    assert calls_of(parsed(template, f"{call}; {call}<eos>")) == [("add", ARGUMENTS)] * 2
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
        ("kimi k2", "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>3<|tool_call_end|>"),
        ("hermes, qwen 2.5 and 3, smollm3, granite 4", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}'),
        ("hermes, qwen 2.5 and 3, smollm3, granite 4", '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}'),
        ("qwen3-coder", "<tool_call><function=add><parameter=a>1<parameter=b>2</parameter></function></tool_call>"),
        ("glm 4.5", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key></tool_call>"),
        ("lfm2", "<|tool_call_start|>[add(a=b'x')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(3)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=" + "[" * 3000 + ")]<|tool_call_end|>"),
        ("gemma 4", '<|tool_call>call:add{unit:<|"|>m}<tool_call|>'),
    ],
)
def test_what_is_no_call_stays_in_the_text(template_of, models: str, text: str) -> None:
    assert parsed(template_of(*FORMS[models]), f"{text}<eos>") == {"role": "assistant", "content": text}


def test_a_value_that_is_text_is_read_by_the_schema_of_its_argument(template_of) -> None:
    template = template_of(*FORMS["qwen3-coder"])
    body = "".join(
        f"<parameter={k}>\n{v}\n</parameter>\n"
        for k, v in (
            ("a", "x y"),
            ("unit", '{"m": 1}'),
            ("c", "[1]"),
            ("d", "True"),
            ("e", "['x', None]"),
            ("note", "True"),
        )
    )
    answer = parsed(template, f"<tool_call>\n<function=add>\n{body}</function>\n</tool_call><eos>")
    assert calls_of(answer) == [
        ("add", {"a": "x y", "unit": '{"m": 1}', "c": [1], "d": True, "e": ["x", None], "note": "True"})
    ]


@pytest.mark.parametrize(
    ("models", "text", "note"),
    [
        ("lfm2", """<|tool_call_start|>[add(note='p("a")\np(1)\\n')]<|tool_call_end|>""", 'p("a")\np(1)\n'),
        (
            "hermes, qwen 2.5 and 3, smollm3, granite 4",
            r"""<tool_call>{"name": "add", "arguments": "{\"note\": \"7\"}"}</tool_call>""",
            "7",
        ),
        (
            "minimax m2",
            '<minimax:tool_call><invoke name="add"><parameter name="note"><parameter=a></parameter></invoke>'
            "</minimax:tool_call>",
            "<parameter=a>",
        ),
    ],
)
def test_strings_with_line_breaks_or_tags_of_other_forms_and_arguments_as_text(
    template_of, models: str, text: str, note: str
) -> None:
    assert calls_of(parsed(template_of(*FORMS[models]), f"{text}<eos>")) == [("add", {"note": note})]


CALL_OF_CODER = "<tool_call>\n<function=add>\n<parameter=note>\nx\n</parameter>\n</function>\n</tool_call>"
CALLS_OF_KIMI = "".join(
    f'<|tool_call_begin|>functions.add:{n}<|tool_call_argument_begin|>{{"note": "x"}}<|tool_call_end|>' for n in (0, 1)
)


@pytest.mark.parametrize(
    ("models", "text", "content"),
    [
        ("qwen3-coder", CALL_OF_CODER.removeprefix("<tool_call>\n"), ""),
        ("qwen3-coder", "Wait.\n" + CALL_OF_CODER.replace("<tool_call>", "").replace("</tool_call>", ""), "Wait."),
        ("qwen3-coder", f"{CALL_OF_CODER.removesuffix('</tool_call>')} So.", "So."),
        ("qwen3-coder", CALL_OF_CODER.replace("\n", ""), ""),
        ("qwen3-coder", '<tool_call>{"name": "add", "arguments": {"note": "x"}}</tool_call>', ""),
        ("minimax m2", '<invoke name="add"><parameter name="note">x</parameter></invoke>', ""),
        ("minicpm5", '<function name="add"><param name="note">x</param></function>', ""),
        ("kimi k2", CALLS_OF_KIMI.replace("<|tool_call_end|>", "", 1), ""),
        ("kimi k2", CALLS_OF_KIMI.removesuffix("<|tool_call_end|>") + "<|tool_calls_section_end|>", ""),
        ("solar open", '<|tool_call:name|>add<|tool_call:args|>{"note": "x"}<|tool_call:end|>', ""),
    ],
)
def test_calls_without_a_tag_that_says_nothing_are_read(template_of, models: str, text: str, content: str) -> None:
    template = template_of(*FORMS[models])
    answer = parsed(template, f"{text}<eos>")
    assert calls_of(answer) == [("add", {"note": "x"})] * text.count("add")
    assert answer["content"] == content
    assert not template.has_unread_call(answer)


@pytest.mark.parametrize("models", ["qwen3-coder", "glm 4.5", "hermes, qwen 2.5 and 3, smollm3, granite 4"])
def test_a_closing_tag_alone_shows_a_call_that_was_tried(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    assert template.has_unread_call(parsed(template, 'add {"a": 1}</tool_call><eos>'))


def test_values_within_objects_and_lists_are_read_by_their_schema(template_of) -> None:
    template = template_of(*FORMS["minimax m3"])
    code = {"type": "object", "properties": {"code": {"type": "string"}}}
    schema = {"type": "object", "properties": {"places": {"type": "array", "items": code}, "one": {"type": "array"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    values = {"places": [{"code": "10"}, {"code": "true"}], "one": [1]}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": values}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = template.chat.text(messages, False, [tool]).rpartition("<|assistant|>")[2]
    answer = template.parse_answer(Turn(template.tokens.ids(text), True), [], (0, 0, 0), [tool])
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
        ("<eos>" + each("<call={{ f.name }}>" + JSON + "</call>"), (), "the end token '<eos>' before a call"),
    ],
    ids=["another text", "another number", "no tag", "a token of answers", "after the end token"],
)
def test_a_form_that_cannot_be_told_or_read_is_refused(template_of, calls: str, special: tuple, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        template_of(calls, special).check_tools()


@pytest.mark.parametrize("models", ["qwen3-coder", "glm 4.5", "minimax m3", "types of values in attributes"])
def test_repeated_tags_of_a_learned_form_are_read_in_linear_time(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    forms = template._parsed_answers._forms
    text = written(template, models).removesuffix("<eos>").partition("7")[0]
    for tag in ("<", "<tool_call>", "<function=", text.partition("a")[2][:40]):
        assert read_calls(text + tag * 20_000, forms, {})[1] == []


@pytest.mark.parametrize(
    "tag",
    ["<parameter=a>", "<parameter=", "<arg_key>", "<arg_key>a</arg_key>\n<arg_value>", "<tool_call>", "[TOOL_CALLS]"],
)
@pytest.mark.parametrize("before", ["<tool_call>", "<tool_call><function=f>"])
def test_repeated_tags_are_read_in_linear_time(tag, before):
    """50,000 tags: a pattern that searches to the end from each of them takes most of an hour."""
    text = before + tag * 50_000
    assert read_calls(text, FORMS_READ, {})[0] in ("", text)
