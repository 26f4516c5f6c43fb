"""Conversations of the chat API as tokens, what follows a sampled answer, and answers as messages."""

from __future__ import annotations

import pytest
from rlhf.errors import DataError
from rlhf.types import Row, Turn
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_testing.chat_templates import CHATML, HERMES, QWEN3

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASK = {"role": "user", "content": "1+1?"}
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a": 1}}\n</tool_call>'
"""With two spaces, which no template writes."""


class Talk:
    """A conversation whose answers are given, as a rollout keeps it: messages, and the tokens so far."""

    def __init__(self, template, *messages, tools=()):
        self.template, self.tools, self.messages = template, tools, list(messages)
        self.prompt = template.messages.encode(messages, tools)
        self.ids = list(self.prompt.ids)

    def answer(self, text, end="<eos>"):
        ids = self.template.tokens.ids(text + end)
        self.ids += ids
        self.closed = bool(end)
        self.said = self.template.messages.answers.parse(Turn(ids, True), self.prompt.ids, (0, 0, len(self.messages)))
        return self.said

    def go_on(self, *messages):
        """The text of the whole context; None if it must be written anew."""
        turn = self.template.messages.encode_following(self.messages, self.said, messages, self.tools, self.closed)
        if turn is None:
            return None
        assert not turn.sampled
        self.ids += turn.ids
        self.messages += [self.said, *messages]
        return self.text

    @property
    def text(self):
        return self.template.tokenizer.decode(self.ids, skip_special_tokens=False)

    def rendered(self):
        return self.template.tokenizer.decode(self.template.messages.encode(self.messages, self.tools).ids)


def result(text, call_id="x"):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


@pytest.mark.parametrize("text", [HERMES, QWEN3])
@pytest.mark.parametrize("end", ["<eos>", ""])
def test_a_conversation_goes_on_as_the_template_would_have_rendered_it(template_with, text, end):
    talk = Talk(template_with(text), ASK)
    assert talk.answer("2", end) == {"role": "assistant", "content": "2"}
    thinks = "<think>\n\n</think>\n\n" if text is QWEN3 else ""
    went_on = talk.go_on({"role": "user", "content": "sure?"})
    if thinks:
        assert went_on is None, "an empty block stands before the last answer only"
        return
    assert went_on == talk.rendered()
    talk.answer("yes", end)
    assert talk.go_on({"role": "user", "content": "really?"}) == talk.rendered()


@pytest.mark.parametrize("text", [HERMES, QWEN3])
def test_a_call_keeps_the_text_that_was_sampled(template_with, text):
    thinks = "<think>\nhm\n</think>\n\n" if text is QWEN3 else ""
    talk = Talk(template_with(text), ASK, tools=[ADD])
    assert '"name": "add"' in talk.text
    message = talk.answer(f"{thinks}{CALL}")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message.get("reasoning_content", "") == ("hm" if thinks else "")
    went_on = talk.go_on(result("2"), result("3"))
    assert CALL in went_on
    assert went_on.replace(",  ", ", ") == talk.rendered()
    assert went_on.endswith(
        "</tool_call><eos>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>"
        "<eos>\n<|im_start|>assistant\n"
    )


def test_reasoning_is_kept_among_tools_and_dropped_before_a_users_message(template_with):
    talk = Talk(template_with(QWEN3), ASK, tools=[ADD])
    talk.answer(f"<think>\nfirst\n</think>\n\n{CALL}")
    assert "first" in talk.go_on(result("2"))
    talk.answer("<think>\nsecond\n</think>\n\nIt is 2.")
    assert talk.said == {"role": "assistant", "content": "It is 2.", "reasoning_content": "second"}
    assert talk.go_on({"role": "user", "content": "sure?"}) is None
    anew = Talk(talk.template, *talk.messages, talk.said, {"role": "user", "content": "sure?"}, tools=[ADD])
    assert "first" not in anew.text
    assert "second" not in anew.text


def test_a_template_that_opens_answers_otherwise_than_it_keeps_them_does_not_go_on(template_with):
    talk = Talk(template_with(QWEN3, template_kwargs={"enable_thinking": False}), ASK, tools=[ADD])
    assert talk.text.endswith("<think>\n\n</think>\n\n")
    talk.answer(CALL)
    assert talk.go_on(result("2")) is None


@pytest.mark.parametrize("place", ["before", "answer"])
def test_a_template_that_rewrites_earlier_messages_does_not_go_on(template_with, place):
    content = (
        "(m.content if loop.revindex < 3 else 'cut')" if place == "before" else "(m.content if loop.last else 'x')"
    )
    talk = Talk(template_with(CHATML.replace("m.content", content)), ASK)
    talk.answer("2")
    assert talk.go_on({"role": "user", "content": "sure?"}) is None


def test_a_message_that_the_template_leaves_out_is_refused(template_with):
    """Templates of gpt-oss, SmolLM3 and MiniMax M2 leave out a system message that is not the first one."""
    unwritten = "{% if m.role != 'system' or loop.first %}"
    text = CHATML.replace("{{ '<|im_start|>' + m", f"{unwritten}{{{{ '<|im_start|>' + m").replace(
        "{% endfor %}", "{% endif %}{% endfor %}"
    )
    system = {"role": "system", "content": "Be short."}
    talk = Talk(template_with(text), system, ASK)
    talk.answer("2")
    for messages in ([system], [ASK, system], [system, ASK]):
        with pytest.raises(DataError, match=r"leaves out part of message \d \(system\): the text 'Be short\.'"):
            talk.go_on(*messages)
    with pytest.raises(DataError, match=r"leaves out part of message 1 \(system\)"):
        talk.template.messages.encode([ASK, system])


def test_the_template_decides_what_it_shows_of_earlier_answers(template_with):
    template = template_with(CHATML.replace("m.content", "(m.content if m.role != 'assistant' or loop.last else '')"))
    assert "2" not in template.messages.encode([ASK, {"role": "assistant", "content": "2"}, ASK]).text


def test_an_end_token_that_only_later_messages_bring(template_with):
    late = CHATML.replace("m.content + '<eos>\\n'", "m.content + ('' if loop.last else '<eos>\\n')")
    late = late.replace("{{ '<|im_start|>assistant", "{{ '<eos>\\n<|im_start|>assistant")
    for end in ("<eos>", ""):
        talk = Talk(template_with(late), ASK)
        talk.answer("2", end)
        assert talk.go_on({"role": "user", "content": "sure?"}) == talk.rendered()


@pytest.mark.parametrize("end", ["<eos>", ""])
@pytest.mark.parametrize("text", ["2", "2\n"])
def test_white_space_after_an_answer_that_the_template_does_not_end(template_with, text, end):
    talk = Talk(template_with(CHATML.replace("'<eos>\\n'", "'\\n\\n'")), ASK)
    talk.answer(text, end)
    assert talk.go_on({"role": "user", "content": "sure?"}).replace("<eos>", "") == talk.rendered()


def test_turns_keep_the_messages_of_their_tokens(template_with):
    template = template_with(HERMES)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [ASK, {"role": "assistant", "content": "Let me add.", "tool_calls": [call]}]
    results = [{"role": "tool", "content": "2", "tool_call_id": "c"}, {"role": "user", "content": "So?"}]
    following = template.messages.encode_following([ASK], messages[1], results, [ADD])
    assert following.messages == (("tool", "2"), ("user", "So?"))
    expected = (("user", "1+1?"), ("assistant", 'Let me add.\nadd({"a": 1})'), *following.messages)
    assert template.messages.encode([*messages, *results], [ADD]).messages == expected


def test_messages_are_read_as_the_api_writes_them(template_with):
    template = template_with(HERMES)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}, "extra": 1}
    messages = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": parts, "name": "u"},
        {"role": "assistant", "content": None, "tool_calls": [call], "provider_specific_fields": {}},
        result("2", "1"),
    ]
    text = template.tokenizer.decode(template.messages.encode(messages).ids)
    assert text.startswith("<|im_start|>system\nS<eos>\n<|im_start|>user\na\nb<eos>\n")
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><eos>' in text


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "there are images, but the policy is a",
        ),
        ({"role": "user", "content": [{"type": "audio"}]}, "content must be text or a list"),
        ({"role": "user", "content": 3}, "content must be text or a list of .* parts, got int 3"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "a tool call must be"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls must be a list"),
    ],
)
def test_messages_in_another_form_are_refused(template_with, message, problem):
    with pytest.raises(DataError, match=problem):
        template_with(CHATML).messages.encode([message])


def test_plain_prompts_have_no_messages(tokenizer_with):
    template = Template(tokenizer_with(None), DataSection())
    for call in (lambda: template.messages, lambda: template.messages.encode([ASK])):
        with pytest.raises(DataError, match="which needs a chat template, but prompts are plain text"):
            call()
    _ = Template(tokenizer_with(CHATML), DataSection()).messages


# ------------------------------------------------------------------------------------------- answers


def parsed(template, text, key=(0, 0, 0), prompt="", tools=()):
    ids, prompt_ids = template.tokens.ids(text), template.tokens.ids(prompt) if prompt else []
    return template.messages.answers.parse(Turn(ids, True), prompt_ids, key, tools)


def test_parallel_calls_have_ids_of_their_own(template_with):
    template = template_with(HERMES)
    message = parsed(template, f"Both.\n{CALL}\n{CALL}<eos>")
    first, second = (call["id"] for call in message["tool_calls"])
    assert message["content"] == "Both."
    assert first != second
    assert all(len(i) == 9 and i.isalnum() for i in (first, second))
    assert parsed(template, f"{CALL}<eos>")["tool_calls"][0]["id"] == first
    assert parsed(template, f"{CALL}<eos>", key=(0, 0, 1))["tool_calls"][0]["id"] != first
    assert parsed(template, f"{CALL}<eos>", key=(0, 1, 0))["tool_calls"][0]["id"] != first


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}\n</tool_call>",
    ],
    ids=["no JSON", "name", "arguments", "empty", "deep"],
)
def test_a_call_that_is_not_one_stays_content(template_with, text):
    message = parsed(template_with(HERMES), f"{text}<eos>")
    assert message == {"role": "assistant", "content": text}
    second_message = parsed(template_with(HERMES), f"{text}</tool_call>{CALL}")
    assert (len(second_message["tool_calls"]), second_message["content"]) == (1, f"{text}</tool_call>")


def test_a_call_whose_end_was_cut_off_is_read_if_it_is_whole(template_with):
    message = parsed(template_with(HERMES), CALL.removesuffix("\n</tool_call>"))
    assert message["tool_calls"][0]["function"]["name"] == "add"


def test_reasoning(template_with):
    template = template_with(QWEN3)
    assert parsed(template, "<think>\na\n</think>\n\nb<eos>")["reasoning_content"] == "a"
    assert parsed(template, "<think>\na")["reasoning_content"] == "a", "cut off"
    assert parsed(template, "<think>\na")["content"] == ""
    opened = parsed(template, "a\n</think>\n\nb", prompt="<|im_start|>assistant\n<think>\n")
    assert opened == {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert parsed(template, "a", prompt="<think>\n")["reasoning_content"] == "a"
    empty = parsed(template, "b", prompt="<think>\n\n</think>\n\n")
    assert empty == {"role": "assistant", "content": "b"}


def test_a_call_ends_reasoning_that_is_not_closed(template_with):
    """Models of Qwen 3.5 and Kimi K2 leave the end out at times."""
    template = template_with(QWEN3)
    for text, prompt in ((f"<think>\na\n{CALL}<eos>", ""), (f"a\n{CALL}<eos>", "<|im_start|>assistant\n<think>\n")):
        message = parsed(template, text, prompt=prompt)
        assert (message["content"], message["reasoning_content"], len(message["tool_calls"])) == ("", "a", 1)
        assert not template.messages.answers.has_unread_call(message)
    for broken, unread in ((CALL.replace("}}", "}"), True), ("no call", False)):
        message = parsed(template, f"<think>\na\n{broken}<eos>")
        assert message["reasoning_content"] == f"a\n{broken}"
        assert template.messages.answers.has_unread_call(message) == unread


def test_a_template_without_tags_leaves_them_in_the_text(template_with):
    text = f"<think>\na\n</think>\n\n{CALL}"
    assert parsed(template_with(CHATML), f"{text}<eos>") == {"role": "assistant", "content": text}


def test_an_answer_has_no_special_token_in_its_text(chat, monkeypatch):
    monkeypatch.setattr(chat, "chat_template", CHATML)
    assert "<|tool|>" not in chat.all_special_tokens, "tokenizer_config.json does not name it"
    assert parsed(Template(chat, DataSection()), "hi<|tool|>") == {"role": "assistant", "content": "hi"}


RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {"content": "text", "close": "<eos>"},
        "tool_calls": {
            "open": "[call]",
            "close": "[/call]",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}


def test_the_tokenizers_own_format_comes_first(tokenizer_with):
    tokenizer = tokenizer_with(HERMES)
    tokenizer.response_template = RESPONSE
    template = Template(tokenizer, DataSection())
    head = "<|im_start|>assistant\n"
    message = parsed(template, '[call]{"name": "f", "arguments": {"a": "1"}}[/call]<eos>', prompt=head)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "1"}'}
    assert parsed(template, "hi<eos>", prompt=head) == {"role": "assistant", "content": "hi"}
    for text in (
        "{nothing",
        "5",
        '{"arguments": {}}',
        '{"name": "f", "arguments": 5}',
        '{"name": "f", "arguments": {"a": NaN}}',
    ):
        broken = parsed(template, f"[call]{text}[/call]<eos>", prompt=head)
        assert broken == {"role": "assistant", "content": f"[call]{text}[/call]"}
        assert template.messages.answers.has_unread_call(broken)
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(DataError, match=r"response_template is not valid: ValueError: .*fields must be"):
        _ = Template(tokenizer, DataSection()).messages


OPENED = QWEN3.replace("<|im_start|>assistant\\n' }}{% endif %}", "<|im_start|>assistant\\n<think>\\n' }}{% endif %}")
"""The policy's answer begins inside its reasoning."""
LLAMA = HERMES.replace("<tool_call>\\n", "").replace("\\n</tool_call>", "")
"""Calls as JSON without tags."""


@pytest.mark.parametrize(("text", "kwargs"), [(QWEN3, {"enable_thinking": False}), (OPENED, {})])
def test_a_call_as_the_template_writes_it_is_read(template_with, text, kwargs):
    assert OPENED != QWEN3
    template_with(text, template_kwargs=kwargs).messages.answers.check_tools()


def test_a_template_whose_calls_cannot_be_read_is_refused(template_with, tokenizer_with):
    assert LLAMA != HERMES
    with pytest.raises(DataError, match=r"forecast.*no call.*response_template"):
        template_with(LLAMA).messages.answers.check_tools()
    with pytest.raises(DataError, match=r"forecast.*'arguments': '\{\}'"):
        template_with(HERMES.replace("call.function.arguments | tojson", "'{}'")).messages.answers.check_tools()
    tokenizer = tokenizer_with(LLAMA)
    tokenizer.response_template = {
        **RESPONSE,
        "fields": {"tool_calls": {**RESPONSE["fields"]["tool_calls"], "open": "\n", "close": "<eos>"}},
    }
    with pytest.raises(DataError, match="no call"):
        Template(tokenizer, DataSection()).messages.answers.check_tools()
    tokenizer = tokenizer_with(HERMES.replace("<tool_call>\\n", "[call]").replace("\\n</tool_call>", "[/call]"))
    tokenizer.response_template = RESPONSE
    Template(tokenizer, DataSection()).messages.answers.check_tools()


def test_tools_that_the_template_does_not_write_are_refused(template_with):
    template = template_with(CHATML)
    for check in (template.messages.answers.check_tools, lambda: template.messages.encode([ASK], [ADD])):
        with pytest.raises(DataError, match="does not write the descriptions of tools"):
            check()
    assert template.messages.encode([ASK])


def test_the_messages_of_a_prompt_are_those_that_it_is_encoded_with(tokenizer_with):
    template = Template(tokenizer_with(HERMES), DataSection(system="Be brief."))
    row = Row({"prompt": "1+1?"}, "rows", 0)
    messages = template.prompt_messages(row)
    assert messages == [{"role": "system", "content": "Be brief."}, ASK]
    encoded, prompt = template.messages.encode(messages), template.encode_prompt(row)
    assert (encoded.ids, encoded.text) == (prompt.ids, prompt.text)
    with pytest.raises(DataError, match="needs a chat template, but prompts are plain text"):
        Template(tokenizer_with(None), DataSection()).prompt_messages(row)
