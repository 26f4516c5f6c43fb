"""Chat templates that write calls in the forms of published ones. They are our own: of the published ones they have
only how a call is written."""

from __future__ import annotations

import json
from typing import Any

from rlhf.types import Turn
from rlhf_runtime.data.template import Template

LOOP = "{% for call in m.tool_calls or [] %}{% set f = call.function %}BODY{% endfor %}"
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
    return LOOP.replace("BODY", call + "{% if not loop.last %}" + separator + "{% endif %}")


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


def parsed(template: Template, text: str) -> dict[str, Any]:
    return template.messages.answers.parse(Turn(template.tokens.ids(text), True), [], (0, 0, 0), [ADD])


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
    text = template.chat.with_tools([ADD]).text([{"role": "user", "content": "?"}, message], False)
    return text.rpartition("<|assistant|>")[2]
