"""What a chat template leaves out of messages and options is refused, and answers have an end token."""

from __future__ import annotations

from datetime import datetime

import pytest
from rlhf.errors import ConfigError, DataError
from rlhf_runtime.data.dataset import TrainData
from rlhf_testing.chat_templates import CHATML, GENERATION, HERMES, LLAMA3, QWEN3

from runtime.tests.data.template_cases import row, runs

ASK, SYSTEM = {"role": "user", "content": "1+2?"}, {"role": "system", "content": "Be brief."}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x", "c": None}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}
ANSWER = {"role": "assistant", "content": "3"}
TALK = [SYSTEM, ASK, CALLS, RESULT, ANSWER]
WRITES = "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<eos>\\n' }}"


def encoded(template, messages):
    """The conversation as a training row."""
    return template.encode_demonstration(row(messages=messages)).sequences[0]


def prompted(template, messages):
    """The conversation as a prompt."""
    return template.encode_prompt(row(prompt=messages))


def trained(template, messages):
    """The trained text, one for each stretch of trained tokens."""
    return runs(template.tokenizer, encoded(template, messages))


# --------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("text", [HERMES, QWEN3, GENERATION])
def test_templates_that_write_every_part_are_taken(template_with, text):
    encoded(template_with(text, loss_on="all"), TALK)
    prompted(template_with(text), [*TALK, ASK])


@pytest.mark.parametrize(
    ("role", "left_out"),
    [("system", r"message 0 \(system\): the text 'Be brief.'"), ("tool", r"message 3 \(tool\): the text '3'")],
)
def test_a_role_that_the_template_drops_is_refused(template_with, role, left_out):
    text = HERMES.replace(f"m.role == '{role}'", "m.role == 'nobody'").replace(
        f"messages[0].role == '{role}'", "messages[0].role == 'nobody'"
    )
    template = template_with(text)
    for call in (lambda: encoded(template, TALK), lambda: prompted(template, [*TALK, ASK])):
        with pytest.raises(DataError, match=f"leaves out part of {left_out}"):
            call()
    encoded(template, [ASK, ANSWER])  # a row of another form is taken


@pytest.mark.parametrize(
    ("dropped", "part"),
    [
        ("call.function.arguments | tojson", "the argument 'a' of its call of 'add'"),
        ("call.function.name", "the name of its call of 'add'"),
        ("m.tool_calls or []", "the name of its call of 'add'"),
        ("m.tool_calls or [][:1]", "the name of its call of 'add'"),
    ],
)
def test_a_part_of_a_call_that_the_template_drops_is_refused(template_with, dropped, part):
    replacement = {"m.tool_calls or [][:1]": "(m.tool_calls or [])[:1]", "m.tool_calls or []": "[]"}.get(dropped, "'?'")
    for text in (HERMES, GENERATION):
        template = template_with(text.replace(dropped.removesuffix("[:1]"), replacement))
        for call in (
            lambda template=template: encoded(template, [ASK, CALLS]),
            lambda template=template: encoded(template, TALK),
            lambda template=template: prompted(template, [*TALK, ASK]),
        ):
            with pytest.raises(DataError, match=rf"message \d \(assistant\): {part}"):
                call()


def test_calls_outside_of_generation_blocks_are_refused(template_with):
    loop = "{% for call in m.tool_calls or [] %}"
    moved = GENERATION.replace(loop, "{{ '<eos>' }}{% endgeneration %}" + loop).replace(
        "{{ '<eos>' }}{% endgeneration %}{{ '\\n' }}", "{{ '<eos>\\n' }}"
    )
    with pytest.raises(DataError, match="the name of its call of 'add', or writes it where it is not trained on"):
        encoded(template_with(moved), [ASK, CALLS])
    encoded(template_with(moved), TALK)  # the answer without calls is trained on
    unmarked = moved.replace("{{ '<eos>' }}{% endgeneration %}", "{% endgeneration %}")
    with pytest.raises(DataError, match=r"block of message 1 \(assistant\) ends before '<tool_call>"):
        encoded(template_with(unmarked), [ASK, CALLS])


def test_reasoning_of_earlier_answers_may_be_left_out(template_with):
    thoughts = {"role": "assistant", "content": "3", "reasoning_content": "hm"}
    in_text = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}
    drops = CHATML.replace("m.content +", "m.content.split('</think>')[-1].lstrip() +")
    for text, first in ((QWEN3, thoughts), (drops, in_text)):
        prompted(template_with(text), [ASK, first, ASK])
        encoded(template_with(text), [ASK, first, ASK, ANSWER])
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(assistant\): 'hm'"):
        encoded(template_with(drops), [ASK, in_text])


def test_each_source_and_form_is_checked(template_with):
    """A template may drop a message only in some conversations."""
    template = template_with(HERMES.replace("{% elif m.role == 'tool' %}", "{% elif m.role == 'tool' and m.name %}"))
    messages = [ASK, CALLS, {**RESULT, "name": "add"}, ASK]
    prompted(template, messages)
    with pytest.raises(DataError, match=r"message 2 \(tool\): the text '3'"):
        prompted(template, [ASK, CALLS, RESULT, ASK])


@pytest.mark.parametrize("loss_on", ["completion", "assistant"])
def test_a_long_conversation_takes_few_renders_more(template_with, monkeypatch, loss_on):
    """Its calls are alike, so that the first one stands for all."""
    template, renders = template_with(HERMES, loss_on=loss_on), []
    apply = template.tokenizer.apply_chat_template
    monkeypatch.setattr(
        template.tokenizer, "apply_chat_template", lambda *words, **kwargs: renders.append(1) or apply(*words, **kwargs)
    )
    talk = [ASK, *[CALLS, RESULT] * 30, ANSWER]
    encoded(template, talk)
    assert len(renders) < 60
    encoded(template, [*talk[:-1], *talk[-3:]])
    assert len(renders) < 70


def test_a_template_that_reads_arguments_as_text(template_with):
    text = HERMES.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    only_text = text.replace("{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}", "")
    only_text = only_text.replace("'' + call.function.arguments }}{% endif %}", "'' + call.function.arguments }}")
    assert trained(template_with(only_text), [ASK, CALLS]) == trained(template_with(HERMES), [ASK, CALLS])


MOVES = "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + CHATML.replace(
    "for m in messages %}", "for m in messages if m.role != 'system' %}"
)
FORGETS = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'assistant' %}{% set ns.last = m %}{% endfor %}"
    + CHATML.replace("m.content", "(m.content if m == ns.last else m.content.split('</think>')[-1])")
)
"""As LFM2.5's: it still shows the reasoning of an answer when the policy is given the next question."""
TWO = [ASK, ANSWER, ASK, {**ANSWER, "content": "4"}]
THOUGHT = {**ANSWER, "content": "<think>hm</think>3"}


@pytest.mark.parametrize(
    ("text", "loss_on", "other"),
    [(MOVES, "assistant", [*TWO[:2], SYSTEM, *TWO[2:]]), (FORGETS, "completion", [ASK, THOUGHT, *TWO[2:]])],
)
def test_what_a_template_may_write_otherwise_is_checked_again(template_with, text, loss_on, other):
    template = template_with(text, loss_on=loss_on)
    encoded(template, TWO)
    with pytest.raises(DataError, match="so the policy would be trained in a context that it never sees"):
        encoded(template, other)


LATE = "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}" + MOVES.partition("endfor %}")[
    2
].replace("m.content", "(messages[0].content if messages[0].role == 'system' and m == asked[-1] else '') + m.content")
"""As Mistral's: a system message stands in the last question only."""
THREE = [*TWO, {**ASK, "content": "5?"}, {**ANSWER, "content": "5"}]
USED = [{**ASK, "content": "0?"}, {**CALLS, "weight": 0}, RESULT, ANSWER, *TWO]
REASONED = [USED[0], {**USED[1], "reasoning_content": "hm"}, *USED[2:]]


@pytest.mark.parametrize(
    ("text", "plain", "other", "message"),
    [(LATE, THREE, [SYSTEM, *THREE], 2), (QWEN3, USED, REASONED, 3)],
)
def test_the_context_of_an_answer_is_checked_with_other_messages_before_it(template_with, text, plain, other, message):
    """The answer itself has the same form in both rows."""
    template = template_with(text, loss_on="assistant")
    encoded(template, plain)
    with pytest.raises(DataError, match=rf"message {message} \(assistant\) after .* a context that it never sees"):
        encoded(template, other)


# ------------------------------------------------------------------------------------------- options


def test_a_system_message_of_the_run_file_that_the_template_drops(template_with):
    text = f"{{% for m in messages %}}{{% if m.role != 'system' %}}{WRITES}{{% endif %}}{{% endfor %}}"
    with pytest.raises(ConfigError, match=r"data\.system: the chat template leaves out system messages"):
        template_with(text, system="Be brief.")
    template_with(text)
    refuses = text.replace(
        "{% if m.role", "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}{% if m.role"
    )
    with pytest.raises(DataError, match="none"):
        prompted(template_with(refuses, system="Be brief."), "hi")


def test_template_kwargs_that_the_template_does_not_read(template_with):
    template_with(QWEN3, template_kwargs={"enable_thinking": False})
    with pytest.raises(ConfigError, match=r"does not read 'enable_thinkin'.* Did you mean 'enable_thinking'\?"):
        template_with(QWEN3, template_kwargs={"enable_thinkin": False})
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    with pytest.raises(ConfigError, match=r"does not read 'tools'.* It reads: no variables\."):
        template_with(CHATML, template_kwargs={"tools": [tool]})
    for other in (tool, {"function": "add"}):  # a template may accept what is not a description of a function
        template_with(HERMES, template_kwargs={"tools": [other]})
    with pytest.raises(ConfigError, match=r"data\.template_kwargs: the chat template leaves out the tool 'add'"):
        template_with(HERMES.replace("tool | tojson", "'a tool'"), template_kwargs={"tools": [tool]})


def test_a_template_that_is_not_valid(template_with):
    with pytest.raises(ConfigError, match="not valid Jinja: line 2"):
        template_with("{% for m in messages %}\n{{ m.content }{% endfor %}")


def test_a_template_that_reads_the_clock_reads_one_time(template_with):
    text = "{{ strftime_now('%d %b %Y') }}" + GENERATION
    template = template_with(text, day=datetime(2001, 2, 3))
    assert prompted(template, "hi").text.startswith("03 Feb 2001")
    assert template.tokenizer.decode(encoded(template, [ASK, ANSWER]).ids).startswith("03 Feb 2001")
    plain = template.tokenizer.apply_chat_template([ASK], tokenize=False)
    assert not plain.startswith("03 Feb 2001"), "only the run's own renders are of its day"
    assert template.chat.day == datetime(2001, 2, 3)
    assert template_with(text).chat.day is not None
    assert template_with(GENERATION).chat.day is None


# ---------------------------------------------------------------------------------------- end tokens

NEXT_ROLE = CHATML.replace("<eos>", "")
"""The next message closes an answer."""
UNMARKED = GENERATION.replace("{{ '<eos>' }}{% endgeneration %}", "{% endgeneration %}{{ '<eos>' }}")
CLOSED = CHATML.replace("m.content + '<eos>", "m.content + ('</answer>' if m.role == 'assistant' else '') + '<eos>")
OPEN_CALL = LLAMA3.replace("{{ '<eos>' }}{% endfor %}", "{{ '' if m.tool_calls else '<eos>' }}{% endfor %}")
SPACED = GENERATION.replace("{{ '<eos>' }}{% endgeneration %}{{ '\\n' }}", "{{ '<eos>\\n' }}{% endgeneration %}")


@pytest.mark.parametrize(
    ("text", "answer", "call"),
    [
        (NEXT_ROLE, "\n3<eos>", None),
        (HERMES.replace("<eos>", ""), "3<eos>", "</tool_call><eos>"),
        (UNMARKED, "3<eos>", "</tool_call><eos>"),
        (CLOSED, "3</answer><eos>", None),
        (SPACED, "3<eos>", "</tool_call><eos>"),
    ],
)
def test_every_answer_that_ends_a_row_has_an_end_token(template_with, text, answer, call):
    assert UNMARKED != GENERATION != SPACED
    template = template_with(text)
    sequence = encoded(template, [ASK, ANSWER])
    assert trained(template, [ASK, ANSWER]) == [answer.removeprefix("\n")]
    assert sequence.ids[-1] == template.tokenizer.eos_token_id
    assert sequence.loss_mask[-1]
    pair = template.encode_pair(row(prompt="p", chosen="g", rejected="b"))
    assert {s.ids[-1] for s in pair.sequences} == {template.tokenizer.eos_token_id}
    if call is not None:
        assert trained(template, [ASK, CALLS])[0].endswith(call)
        assert "<eos>" not in trained(template, [ASK, CALLS])[0].removesuffix("<eos>")
    encoding = encoded(template_with(text, loss_on="all"), [ASK, ANSWER])
    assert template.tokenizer.decode(encoding.ids).rstrip().endswith("<eos>")
    assert all(encoding.loss_mask)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(NEXT_ROLE, "3<eos>"), (CLOSED, "3</answer><eos>"), (UNMARKED, "3<eos>"), (SPACED, "3<eos>")],
)
def test_the_end_of_a_trained_answer_that_others_follow(template_with, text, expected):
    template = template_with(text, loss_on="assistant")
    assert trained(template, [ASK, ANSWER, ASK, {**ANSWER, "content": "4", "weight": 0}]) == [expected]


def test_a_call_without_an_end_token_gets_that_of_answers(template_with):
    texts = trained(template_with(OPEN_CALL), [ASK, {**CALLS, "tool_calls": [CALL]}])
    assert texts == ['{"name": "add", "parameters": {"a": 1, "b": "x", "c": null}}<eos>']


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (NEXT_ROLE, "writes no end token after an answer"),
        (OPEN_CALL, "writes no end token after a tool call"),
        (UNMARKED, "leave out the end token '<eos>'"),
        (HERMES, ""),
        (LLAMA3, ""),
        (SPACED, ""),
    ],
)
def test_the_start_says_that_end_tokens_are_added(template_with, load, text, note):
    tokenizer = template_with(text).tokenizer
    section = load(tokenizer, "prompts", [{"prompt": "p", "response": "r"}]).section
    for form, answers in (("demonstrations", False), ("prompts", True), ("prompts", False)):
        notes = [n for n in TrainData(section, tokenizer, form, 0, answers).notes if "end token" in n]
        assert [note in n for n in notes] == ([True] if note and (answers or form != "prompts") else [])
