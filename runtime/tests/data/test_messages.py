"""Messages are normalised in one way, whether they come from a row, an environment or a program."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import DataError
from rlhf.types import Row
from rlhf_runtime.data.conversions import turns
from rlhf_runtime.data.messages import as_api_writes, as_template_reads
from rlhf_testing.chat_templates import CHATML, HERMES, QWEN3

from runtime.tests.data.template_cases import trained

USER, BOT = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
UNGUARDED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if 'tool_calls' in m %}{% if m.tool_calls | length > 9 %}many{% endif %}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endif %}"
    "{% if m.name is defined %}({{ m.name }}){% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Asks only whether fields are there, and writes arguments as JSON whatever their type, as published ones do."""


def call(arguments, **fields):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}, **fields}


def prompt_text(template, messages):
    """The text of a prompt; the same from a row and from a program."""
    turn = template.encode_prompt(Row({"prompt": messages}, "rows", 0))
    assert turn.ids == template.messages.encode(messages).ids
    assert template.messages.encode(template.prompt_messages(Row({"prompt": messages}, "rows", 0))).ids == turn.ids
    return template.tokenizer.decode(turn.ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "role"),
    [("developer", "system"), ("human", "user"), ("gpt", "assistant"), ("function", "tool"), ("observation", "tool")],
)
def test_other_names_of_roles_reach_the_template_as_its_own(template_with, name, role):
    template = template_with(QWEN3)
    messages = [{"role": name, "content": "first"}, {"role": "human", "content": "and"}]
    expected = [{"role": role, "content": "first"}, {"role": "user", "content": "and"}]
    assert prompt_text(template, messages) == prompt_text(template, expected)
    assert "first" in prompt_text(template, messages)


@pytest.mark.parametrize("name", ["User", None, ["user"]])
def test_other_roles_are_refused_with_the_message(template_with, name):
    template = template_with(QWEN3)
    messages = [USER, {"role": name, "content": "x"}, USER]
    for column in ("prompt", "messages"):
        with pytest.raises(DataError, match=r"message 1: the role is .*; allowed: system, user, assistant, tool"):
            template.encode_prompt(Row({column: messages}, "rows", 0))
    with pytest.raises(DataError, match="message 1: the role is"):
        template.messages.encode(messages)


def test_a_system_message_of_another_name_is_one(template_with):
    """A second one, from data.system, would stand before it."""
    row = Row({"prompt": [{"role": "developer", "content": "S"}, USER]}, "rows", 0)
    with pytest.raises(DataError, match="the row has its own system message"):
        template_with(CHATML, system="T").encode_prompt(row)


@pytest.mark.parametrize("text", [HERMES, UNGUARDED])
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "\u00e9"}', {"a": 1, "b": "é"}])
def test_arguments_are_written_once(template_with, text, arguments):
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}, {**USER, "content": "and"}]
    prompt = prompt_text(template_with(text), talk)
    assert '{"a": 1, "b": "' in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(template_with, arguments):
    talk = [USER, {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}, USER]
    assert "[add {}]" in prompt_text(template_with(UNGUARDED), talk)


@pytest.mark.parametrize(
    "form",
    [
        {"tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"tool_calls": [call({"a": 1}, id=None, index=0)]},
        {"function_call": {"name": "add", "arguments": '{"a": 1}'}, "tool_calls": None},
    ],
)
def test_calls_in_other_forms(template_with, form):
    for content in ("", None):
        talk = [USER, {"role": "assistant", "content": content, **form}, USER]
        assert '[add {"a": 1}]' in prompt_text(template_with(UNGUARDED), talk)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"reasoning_content": [{"type": "text", "text": "hm"}]},
            "message 1: reasoning_content must be text, got list",
        ),
        ({"content": [{"type": "reasoning", "text": "hm"}]}, "message 1: content must be text or a list of"),
    ],
)
def test_reasoning_that_would_be_lost_or_spoken_is_refused(template_with, answer, says):
    with pytest.raises(DataError, match=says):
        template_with(QWEN3).messages.encode([USER, {**BOT, **answer}, USER])


@pytest.mark.parametrize("arguments", ["[1]", "a=1", 3, '{"a": 1, "a": 2}', '{"a": NaN}'])
def test_a_row_whose_arguments_are_no_object_is_refused(template_with, arguments):
    row = Row({"prompt": [USER, {**BOT, "tool_calls": [call(arguments)]}, USER]}, "rows", 0)
    with pytest.raises(DataError, match="column 'prompt', message 1: the arguments of a tool call must be an object"):
        template_with(UNGUARDED).encode_prompt(row)


def test_null_fields_are_absent(template_with):
    """As tables write them for messages that lack a field of others."""
    nulls = {"tool_calls": None, "name": None, "tool_call_id": None}
    talk = [{**USER, **nulls}, {**BOT, **nulls, "tool_calls": []}, {**USER, **nulls}]
    assert prompt_text(template_with(UNGUARDED), talk) == prompt_text(template_with(UNGUARDED), [USER, BOT, USER])


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_of_tables_are_those_of_jsonl(template_with, load, kind):
    """A table has the fields of all rows in every row: the arguments of one tool in the calls of another."""

    def tool(name, *arguments):
        schema = {"type": "object", "properties": {a: {"type": "integer"} for a in arguments}}
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    calls = [call({"a": 1, "b": {"c": 2}}), call({"city": "Rome"}), call({}), call({"ids": [1, 2]}, id="9")]
    rows = [
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [c]},
                {"role": "tool", "content": "2", "name": "add"},
                BOT,
            ],
            "request": {"tools": [tool("add", "a", "b"), tool("weather", "city")], "seed": None},
        }
        for c in calls
    ]
    tokenizer = template_with(UNGUARDED).tokenizer
    results = []
    for file_form in ("jsonl", kind):
        data = load(tokenizer, "demonstrations", rows, file_form)
        source_rows = data.take(len(rows))
        results.append([[s.ids for s in e.sequences] for e in data.examples(source_rows)])
        assert [row["request"] for row in source_rows] == [row["request"] for row in rows]
    assert results[0] == results[1]


def test_content_that_is_null_beside_calls_is_empty_in_training_rows_too(template_with):
    template = template_with(UNGUARDED)
    for loss_on in ("completion", "all"):
        history = [USER, {"role": "assistant", "content": None, "tool_calls": [call({"a": 1})]}]
        tool = {"role": "tool", "content": "2"}
        row = Row({"messages": [*history, tool, BOT]}, "rows", 0)
        [sequence] = template_with(UNGUARDED, loss_on=loss_on).encode_demonstration(row).sequences
        content = template.tokenizer.decode(sequence.ids, skip_special_tokens=False)
        assert content == 'user:1+1?<eos>assistant:[add {"a": 1}]<eos>tool:2<eos>assistant:2<eos>'


def test_pairs_whose_fronts_are_written_otherwise_are_equal(template_with):
    front = [USER, {"role": "assistant", "content": "", "tool_calls": [call('{"a": 1}')]}]
    rewrite = [
        {"role": "human", "content": "1+1?", "name": None},
        {"role": "gpt", "content": None, "tool_calls": [call({"a": 1})]},
    ]
    tool = {"role": "tool", "content": "2"}
    row = Row({"chosen": [*front, tool, BOT], "rejected": [*rewrite, tool, {**BOT, "content": "3"}]}, "rows", 0)
    chosen, rejected = template_with(UNGUARDED).encode_pair(row).sequences
    assert chosen.ids[:-2] == rejected.ids[:-2]


def test_other_texts_of_a_message_reach_the_template(template_with):
    """Templates read fields of their own, such as ``thinking``."""
    thinks = CHATML.replace("m.content", "(m.thinking or '') + m.content")
    talk = [USER, {**BOT, "thinking": "hm ", "meta": {"id": 1}}, USER]
    assert "assistant\nhm 2<eos>" in prompt_text(template_with(thinks), talk)


def test_programs_get_arguments_as_the_api_writes_them(template_with):
    prompt = [USER, {"role": "gpt", "content": None, "tool_calls": [call({"a": 1})]}, USER]
    history = template_with(UNGUARDED).prompt_messages(Row({"prompt": prompt}, "rows", 0))
    assert (history[1]["role"], history[1]["content"]) == ("assistant", "")
    assert history[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    messages, images = as_template_reads(
        [USER, {"role": "assistant", "content": None, "tool_calls": [call('{"a":1}')]}]
    )
    assert images == []
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    [_, answer] = as_api_writes(messages)
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert as_template_reads([USER, answer])[0] == messages


# ------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "flag",
    [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss_weight": 0.0}],
)
def test_an_answer_of_weight_0_is_not_trained_on(template_with, flag):
    talk = [USER, {**BOT, **flag}, USER, {**BOT, "content": "3", "weight": 1}]
    row = {"messages": talk}
    for loss_on in ("assistant", "completion"):
        template = template_with(CHATML, loss_on=loss_on)
        [sequence] = template.encode_demonstration(Row(row, "rows", 0)).sequences
        assert trained(template.tokenizer, sequence) == "3<eos>"
    with pytest.raises(DataError, match=r"message 1 \(assistant\) has the weight 0, but data.loss_on = 'all' trains"):
        template_with(CHATML, loss_on="all").encode_demonstration(Row(row, "rows", 0))


@pytest.mark.parametrize(
    ("weights", "loss_on", "says"),
    [
        (
            [1, 0],
            "completion",
            r"message 3 \(assistant\) has the weight 0, but data.loss_on = 'completion' trains on it",
        ),
        ([0, 0], "assistant", "every answer has the weight 0"),
        ([1, 0.5], "assistant", "message 3: weight is float 0.5; allowed: 1, and 0"),
        (["0", 1], "assistant", "message 1: weight is str '0'; allowed: 1, and 0"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(template_with, weights, loss_on, says):
    talk = [USER, {**BOT, "weight": weights[0]}, USER, {**BOT, "weight": weights[1]}]
    template = template_with(CHATML, loss_on=loss_on)
    with pytest.raises(DataError, match=says):
        template.encode_demonstration(Row({"messages": talk}, "rows", 0))


def test_templates_do_not_see_weights(template_with):
    text = CHATML.replace("m.content", "(m | length | string) + m.content")
    assert "assistant\n22<eos>" in prompt_text(template_with(text), [USER, {**BOT, "weight": 0, "train": False}, USER])


@pytest.mark.parametrize("parallel", [False, True])
def test_tool_calls_in_sharegpt_turns_are_those_of_the_chat_api(parallel):
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "look_up", "arguments": "{}"}][: 1 + parallel]
    value = json.dumps(calls if parallel else calls[0])
    talk = [("human", "1+1?"), ("function_call", value), ("observation", "2"), ("gpt", "2")]
    row = turns({"messages": [{"from": speaker, "value": text} for speaker, text in talk]}, True)
    messages = [USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "2"}, BOT]
    assert as_template_reads(row["messages"]) == as_template_reads(messages)


def test_parts_of_llama_factory_are_those_of_the_chat_api():
    def part(kind, value):
        return {"type": kind, "value": value}

    value = {"name": "add", "arguments": {"a": 1}}
    answer = [part("reasoning", "Hm."), part("text", "So:"), part("tool_call", json.dumps(value))]
    looked = {"role": "user", "content": [part("image_url", "a.png"), part("text", "What?")]}
    messages = [
        looked,
        {"role": "assistant", "content": answer, "loss_weight": 1.0},
        {"role": "tool", "content": [part("text", "2")]},
    ]
    expected = [
        {"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": [value]},
        {"role": "tool", "content": "2"},
    ]
    assert as_template_reads(messages) == as_template_reads(expected)
    for broken in (part("tool_call", "add(1)"), part("tool_call", value), part("reasoning", None)):
        with pytest.raises(DataError, match="message 0: reasoning must be text, and a tool call must be JSON as text"):
            as_template_reads([{"role": "assistant", "content": [broken]}])
