"""Answers with tool calls are trained on as the policy would sample them: text, calls, end token."""

from __future__ import annotations

import json

import pytest
from rlhf.errors import DataError
from rlhf.types import Turn
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_testing.chat_templates import CHATML, GENERATION, HERMES, LLAMA3, QWEN3

from runtime.tests.data.template_cases import row, runs

ASK = {"role": "user", "content": "1+2?"}
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def call(name="add", **arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(content, *calls, **fields):
    return {"role": "assistant", "content": content, **fields, **({"tool_calls": list(calls)} if calls else {})}


def result(text):
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": text}


def answers(template, *messages):
    """The trained text of a conversation, one for each stretch of trained tokens."""
    return runs(template.tokenizer, template.encode_demonstration(row(messages=[*messages])).sequences[0])


def hermes(*calls):
    """A plain statement of what a policy with these templates writes."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{c["function"]["name"]}", "arguments": {json.dumps(c["function"]["arguments"])}}}\n'
        "</tool_call>"
        for c in calls
    )


ADD, MULTIPLY = call(a=1, b=2), call("multiply", a='"3"\n', b=[1, {"x": None}])


@pytest.mark.parametrize("text", [HERMES, QWEN3, GENERATION])
@pytest.mark.parametrize("content", ["Let me add.", "", " \n"])
def test_text_calls_and_end_token_are_trained_on(template_with, text, content):
    template, calls = template_with(text), [MULTIPLY, ADD]
    expected = (content + "\n" if content else "") + hermes(*calls) + "<eos>"
    thought = EMPTY_THOUGHT if text is QWEN3 else ""
    [trained] = answers(template, ASK, reply(content, *calls))
    assert trained == thought + expected
    prompt = template.messages.encode([ASK])
    sampled = template.messages.answers.parse(Turn(template.tokens.ids(trained), True), prompt.ids, (0, 0, 0))
    assert sampled["content"].strip() == content.strip()
    functions = [c["function"] for c in sampled["tool_calls"]]
    assert [{**f, "arguments": json.loads(f["arguments"])} for f in functions] == [c["function"] for c in calls]


def test_a_call_in_place_of_text(template_with):
    template = template_with(LLAMA3)
    assert answers(template, ASK, reply("", ADD)) == ['{"name": "add", "parameters": {"a": 1, "b": 2}}<eos>']
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): 'Let me add.'"):
        answers(template, ASK, reply("Let me add.", ADD))


@pytest.mark.parametrize("text", [HERMES, QWEN3, GENERATION, LLAMA3])
def test_every_answer_of_a_conversation_with_calls(template_with, text):
    template = template_with(text, loss_on="assistant")
    talk = [ASK, reply("", ADD), result('{"sum": "3"}\n'), reply("It is 3."), ASK, reply("", ADD)]
    expected = [hermes(ADD) + "<eos>", "It is 3.<eos>", hermes(ADD) + "<eos>"]
    if text is LLAMA3:
        expected[0] = expected[2] = '{"name": "add", "parameters": {"a": 1, "b": 2}}<eos>'
    if text is QWEN3:
        expected[2] = EMPTY_THOUGHT + expected[2]
    assert answers(template, *talk) == expected


def test_reasoning_before_a_call_is_trained_on(template_with):
    template = template_with(QWEN3, loss_on="assistant")
    thinking = reply("Adding.", ADD, reasoning_content="two numbers\n")
    answered = reply("3", reasoning_content="done")
    assert answers(template, ASK, thinking, result("3"), answered) == [
        f"<think>\ntwo numbers\n\n</think>\n\nAdding.\n{hermes(ADD)}<eos>",
        "<think>\ndone\n</think>\n\n3<eos>",
    ]
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): 'two numbers'"):
        answers(template, ASK, thinking, result("3"), answered, ASK, answered)
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): 'done'"):
        answers(template_with(CHATML), ASK, answered)


def test_text_of_the_template_between_text_and_call(template_with):
    spaced = HERMES.replace("{% for call in m.tool_calls or [] %}", "{{ '[calls]' if m.tool_calls else '' }}\\g<0>", 1)
    spaced = spaced.replace("\\g<0>", "{% for call in m.tool_calls or [] %}")
    assert answers(template_with(spaced), ASK, reply("Sure.", ADD)) == [f"Sure.[calls]\n{hermes(ADD)}<eos>"]


@pytest.mark.parametrize("end", ["<unk>", "<|tool|>"])  # of these, tokenizer_config.json names only the first
def test_a_call_with_an_end_token_of_its_own(chat, monkeypatch, end):
    template_text = LLAMA3.replace(
        "{{ '<eos>' }}{% endfor %}", f"{{{{ '{end}' if m.tool_calls else '<eos>' }}}}{{% endfor %}}"
    )
    monkeypatch.setattr(chat, "chat_template", template_text)
    template = Template(chat, DataSection(messages="messages", loss_on="assistant"))
    expected = '{"name": "add", "parameters": {"a": 1, "b": 2}}' + end
    assert answers(template, ASK, reply("", ADD), result("3"), reply("3")) == [expected, "3<eos>"]
    assert answers(template, ASK, reply("", ADD)) == [expected]


@pytest.mark.parametrize("text", [GENERATION, LLAMA3])
def test_pairs_that_differ_in_the_call_only(template_with, text):
    columns = {"prompt": "1+2?", "chosen": [reply("", ADD)], "rejected": [reply("", call(a=1, b=3))]}
    pair = template_with(text).encode_pair(row(**columns))
    chosen, rejected = (template_with(text).tokenizer.decode(s.ids) for s in pair.sequences)
    assert '"b": 2}' in chosen
    assert rejected == chosen.replace('"b": 2}', '"b": 3}')
    assert all(s.loss_mask[-1] and s.ids[-1] == 1 for s in pair.sequences)
    with pytest.raises(DataError, match="the same tokens, so there is no preference"):
        template_with(text).encode_pair(row(**{**columns, "rejected": columns["chosen"]}))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_in_a_field_that_the_template_does_not_read(template_with, field):
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): 'hm'"):
        answers(template_with(HERMES), ASK, reply("3", **{field: "hm"}))
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): the text 'hm'"):
        answers(template_with(HERMES, loss_on="all"), ASK, reply("3", **{field: "hm"}))
    template_with(HERMES).encode_prompt(row(prompt=[ASK, reply("3", **{field: "hm"}), ASK]))
