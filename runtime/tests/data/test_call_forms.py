"""Calls in the forms of published chat templates."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import DataError
from rlhf_runtime.data.call_forms import FORMS as FORMS_READ
from rlhf_runtime.data.call_forms import argument_types, read_calls, read_channels

from runtime.tests.data.call_templates import ADD, ARGUMENTS, FORMS, calls_of, count, parsed, written


@pytest.mark.parametrize("models", FORMS)
def test_calls_are_read_as_a_template_of_these_models_writes_them_and_a_broken_one_is_noticed(
    template_of, models: str
) -> None:
    template = template_of(*FORMS[models])
    template.messages.answers.check_tools()
    text = written(template, models)
    answer = parsed(template, text)
    assert calls_of(answer) == [("add", ARGUMENTS)] * count(models)
    assert answer["content"] == ("Wait." if "Wait." in text else "")
    assert len({call["id"] for call in answer["tool_calls"]}) == len(answer["tool_calls"])
    assert not template.messages.answers.has_unread_call(answer)
    unread = parsed(template, text[: text.rindex("7")])
    assert template.messages.answers.has_unread_call(unread), unread
    text_only = parsed(template, "I would call add.<eos>")
    assert calls_of(text_only) == []
    assert not template.messages.answers.has_unread_call(text_only)


@pytest.mark.parametrize("models", FORMS)
def test_a_call_that_is_cut_off_is_never_read_with_other_arguments(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    text = written(template, models).removesuffix("<eos>")
    forms = template.messages.answers._forms
    for end in range(len(text)):
        content, calls = read_calls(text[:end], forms, argument_types([ADD]))
        if "gpt-oss" in models:
            content, _, calls = read_channels(text[:end])
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("add", ARGUMENTS)] * len(calls)
        assert calls or content == text[:end], "what is no call stays in the text"


@pytest.mark.parametrize("calls", ["", "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"])
def test_templates_whose_calls_cannot_be_read_are_refused(template_of, calls: str) -> None:
    """Phi-4-mini's template, as published, writes no calls."""
    with pytest.raises(DataError, match="tools would never be called"):
        template_of(calls, ()).messages.answers.check_tools()


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
        ("lfm2", "<|tool_call_start|>[add(a=-1e999)]<|tool_call_end|>"),
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
    assert not template.messages.answers.has_unread_call(answer)


@pytest.mark.parametrize("models", ["qwen3-coder", "glm 4.5", "hermes, qwen 2.5 and 3, smollm3, granite 4"])
def test_a_closing_tag_alone_shows_a_call_that_was_tried(template_of, models: str) -> None:
    template = template_of(*FORMS[models])
    assert template.messages.answers.has_unread_call(parsed(template, 'add {"a": 1}</tool_call><eos>'))


@pytest.mark.parametrize(
    "tag",
    [
        "<parameter=a>",
        "<parameter=",
        "<function=",
        "<arg_key>",
        "<arg_key>a</arg_key>\n<arg_value>",
        "<tool_call>",
        "[TOOL_CALLS]",
    ],
)
@pytest.mark.parametrize("prefix", ["<tool_call>", "<tool_call><function=f>"])
def test_repeated_tags_are_read_in_linear_time(tag, prefix):
    """50,000 tags: a pattern that searches to the end from each of them takes most of an hour."""
    text = prefix + tag * 50_000
    assert read_calls(text, FORMS_READ, {})[0] in ("", text)
