"""Prompts and observations: their tokens, and the templates that are refused."""

from __future__ import annotations

from array import array

import pytest
from rlhf.errors import ConfigError
from rlhf_runtime.data.template import Template

from runtime.tests.data.template_cases import (
    CHATML,
    GENERATION,
    THINKING,
    TWO_ENDS,
    encoded,
    refused,
    row,
    section,
    talk,
    trained,
)

# ------------------------------------------------------------------------------------------- prompts


def test_plain_prompt_is_the_text_as_it_is(chars):
    turn = Template(chars, section()).encode_prompt(row(prompt="1+1= "))
    assert (chars.decode(turn.ids), turn.text, turn.sampled) == ("1+1= ", "1+1= ", False)


def test_plain_prompt_with_system_and_input_template(chars):
    template = Template(chars, section(system="Do. ", input_template="Q: {q}\nA: "))
    assert template.encode_prompt(row(q="2", r="3")).text == "Do. Q: 2\nA: "
    message = refused(lambda: template.encode_prompt(row(question="2")))
    assert "the row has no column 'q'; columns of the row: question" in message
    message = refused(lambda: template.encode_prompt(row(q=None)))
    assert "the row has null in column 'q'" in message


def test_chat_prompt_ends_where_the_policy_answers(chat):
    turn = Template(chat, section(system="Be brief.")).encode_prompt(row(prompt="hi"))
    assert chat.decode(turn.ids) == "<|system|>Be brief.<eos><|user|>hi<eos><|assistant|>"
    assert turn.text == "Be brief.hi"
    turn = Template(chat, section()).encode_prompt(row(prompt=talk(*"abc")))
    assert chat.decode(turn.ids) == "<|user|>a<eos><|assistant|>b<eos><|user|>c<eos><|assistant|>"


def test_template_plain_ignores_the_chat_template_on_request(chat):
    assert Template(chat, section(template="plain")).encode_prompt(row(prompt="hi")).text == "hi"


def test_samples_share_the_array_of_their_prompt_and_none_can_lengthen_it(chat):
    template = Template(chat, section())
    first, second = (template.encode_prompt(row(prompt="hi")) for _ in range(2))
    assert first.ids is second.ids
    assert first is not second
    with pytest.raises(BufferError):
        first.ids.append(7)
    with pytest.raises(BufferError):
        first.ids += second.ids


def test_template_kwargs_reach_the_template(with_template):
    tokenizer = with_template(THINKING)
    prompt = Template(tokenizer, section(template_kwargs={"enable_thinking": False})).encode_prompt(row(prompt="x"))
    assert tokenizer.decode(prompt.ids).endswith("assistant\n<think>\n\n</think>\n\n")


def test_template_kwargs_that_are_not_the_templates_are_refused(chat):
    kwargs = {"enable_thinking": True, "tokenize": True, "add_generation_prompt": False}
    with pytest.raises(ConfigError, match=r"^data.template_kwargs: add_generation_prompt, tokenize cannot be set"):
        Template(chat, section(template_kwargs=kwargs))


def test_tools_choose_among_templates_as_they_do_for_the_tokenizer(with_template):
    """A tokenizer may have several; answers are found in the one that is rendered."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    loud = GENERATION.replace("m.content + '<|im_end|>' }}{% endgen", "m.content | upper + '<|im_end|>' }}{% endgen")
    templates = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}" + loud}
    tokenizer = with_template(templates)
    for kwargs, front, answer in (({}, "", "y"), ({"tools": tools}, "f", "Y")):
        sequence = encoded(tokenizer, talk("x", "y"), template_kwargs=kwargs)
        assert tokenizer.decode(sequence.ids) == (
            f"{front}<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        )
        assert trained(tokenizer, sequence) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (3, "column 'prompt': must be text or a list of {role, content} messages, got int '3'"),
        ([], "must be a list of {role, content} messages, got '[]'"),
        ([{"role": "user"}], "message 0: content must be text, got 'None'"),
        (["x"], "message 0: must be {role, content}, got str 'x'"),
        ([{"role": "assistant", "content": "x"}], "a prompt must not end with an assistant message"),
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
            "its own system message, but data.system",
        ),
    ],
)
def test_prompts_that_are_refused(chat, prompt, expected):
    answer = row(m=[{"role": "assistant", "content": "x"}])
    assert "so there is no prompt" in refused(lambda: Template(chat, section(messages="m")).encode_prompt(answer))
    assert expected in refused(lambda: Template(chat, section(system="S")).encode_prompt(row(prompt=prompt)))


def test_a_missing_column_names_those_present(chat):
    message = refused(lambda: Template(chat, section()).encode_prompt(row(promt="x", label="y")))
    assert message == "no column 'prompt'; columns present: promt, label. Did you mean 'promt'?"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"template": "chat"}, "the tokenizer has no chat template"),
        ({"messages": "m"}, "data.messages needs a chat template, but the tokenizer has no chat template"),
        (
            {"template": "plain", "template_kwargs": {"a": 1}},
            "data.template_kwargs needs a chat template, but data.template",
        ),
        ({"earlier_answers": "sampled"}, "data.earlier_answers = 'sampled' needs a chat template"),
    ],
)
def test_chat_options_without_a_chat_template(chars, fields, expected):
    assert expected in refused(lambda: Template(chars, section(**fields)), ConfigError)


def test_plain_options_with_a_chat_template(chat):
    message = refused(lambda: Template(chat, section(add_eos=False)), ConfigError)
    assert "is for plain text, but a chat template is used; set data.template = 'plain'" in message


# --------------------------------------------------------------------------------------- observations


def test_observations_continue_as_the_template_would_have_rendered(chat, with_template):
    for text, end in ((None, "<eos>"), (CHATML, "<|im_end|>"), (TWO_ENDS, "<eos><|im_end|>")):
        tokenizer = with_template(text) if text else chat
        template = Template(tokenizer, section())
        prompt = template.encode_prompt(row(prompt="a")).ids
        sampled, cut_off = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("4!" + end, "4!"))
        ids = prompt + array("i", sampled) + template.observations.encode("ok?").ids
        turns = talk("a", "4!", "ok?")
        expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        cut = prompt + array("i", cut_off) + template.observations.encode("ok?", closed=False).ids
        assert tokenizer.decode(cut, skip_special_tokens=False) == expected
        assert template.observations.encode("ok?").text.strip().endswith("ok?" if tokenizer is chat else "assistant")


@pytest.mark.parametrize("change", ["", " | trim", ".lstrip()", ".rstrip()"])
def test_white_space_around_an_observation_is_written_as_the_template_writes_it(with_template, change):
    """Llama 3 and Gemma remove it from every message."""
    tokenizer = with_template(CHATML.replace("content", f"content{change}"))
    template, text = Template(tokenizer, section()), " \n(Down)\nSFFF\n"
    ids = template.encode_prompt(row(prompt="a")).ids + array("i", template.tokens.ids("4!<|im_end|>"))
    ids += template.observations.encode(text).ids
    expected = tokenizer.apply_chat_template(talk("a", "4!", text), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert (text in expected) == (change == "")


def test_an_observation_after_an_answer_that_the_template_does_not_end(chat, monkeypatch):
    """The token after the answer opens the user's message."""
    monkeypatch.setattr(chat, "chat_template", chat.chat_template.replace(" + '<eos>'", ""))
    template = Template(chat, section())
    prompt = template.encode_prompt(row(prompt="a")).ids
    for end, closed in (("<eos>", True), ("", False)):
        ids = prompt + array("i", template.tokens.ids("4!" + end)) + template.observations.encode("ok?", closed).ids
        assert chat.decode(ids) == f"<|user|>a<|assistant|>4!{end}<|user|>ok?<|assistant|>"


def test_plain_observations_are_the_text(chars):
    assert Template(chars, section()).observations.encode("higher").text == "higher"


def test_opening_is_in_the_users_message(chat, chars):
    opening = Template(chat, section()).encode_opening(row(prompt="a"), "Guess.")
    assert [chat.decode(t.ids) for t in opening] == ["<|user|>a\n\nGuess.<eos><|assistant|>"]
    assert [t.text for t in Template(chat, section()).encode_opening(row(prompt="a"), "")] == ["a"]
    assert [t.text for t in Template(chars, section()).encode_opening(row(prompt="a"), "b")] == ["a", "b"]


def test_an_opening_joins_a_users_message_and_follows_any_other(chat):
    template, user = Template(chat, section()), {"role": "user", "content": "a"}

    def opened(*messages):
        [turn] = template.encode_opening(row(prompt=list(messages)), "Guess.")
        return turn.ids

    def prompt_ids(*messages):
        return template.encode_prompt(row(prompt=list(messages))).ids

    rules = {"role": "system", "content": "Rules."}
    assert opened(user) == prompt_ids({**user, "content": "a\n\nGuess."})
    assert opened({**user, "content": ""}) == prompt_ids({**user, "content": "Guess."}), "no blank line after nothing"
    assert opened(rules) == prompt_ids(rules, {**user, "content": "Guess."})


def test_turns_of_an_environment_keep_the_messages_that_a_template_wrote(chat, chars):
    template, rules = Template(chat, section()), {"role": "system", "content": "Rules."}
    [turn] = template.encode_opening(row(prompt=[rules, {"role": "user", "content": "a"}]), "Guess.")
    assert turn.messages == (("system", "Rules."), ("user", "a\n\nGuess."))
    assert template.observations.encode("higher").messages == (("user", "higher"),)
    assert template.encode_prompt(row(prompt="a")).messages == (), "samples are saved with their row's prompt"
    assert Template(chars, section()).observations.encode("higher").messages == ()


@pytest.mark.parametrize(
    ("kwargs", "reason"), [({}, "drops its reasoning"), ({"enable_thinking": False}, "writes it differently")]
)
def test_templates_that_rewrite_history_are_refused_for_several_turns(with_template, kwargs, reason):
    template = Template(with_template(THINKING), section(template_kwargs=kwargs))
    template.encode_prompt(row(prompt="one turn is fine"))
    for call in (template.observations.check, lambda: template.observations.encode("x")):
        message = refused(call)
        assert "the chat template rewrites history" in message
        assert reason in message
        assert 'data.earlier_answers = "sampled"' in message
    sampled = Template(with_template(THINKING), section(template_kwargs=kwargs, earlier_answers="sampled"))
    sampled.observations.check()
    turns = talk("q", "A", "x")
    text = sampled.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **kwargs)
    observation = sampled.observations.encode("x", closed=False)
    assert sampled.tokenizer.decode(observation.ids, skip_special_tokens=False) == text.partition("A")[2]


def test_a_template_that_refuses_the_messages_says_why(with_template):
    tokenizer = with_template(
        "{{ raise_exception('no system please') if messages[0].role == 'system' else messages[0].content }}"
    )
    message = refused(lambda: Template(tokenizer, section(system="S")).encode_prompt(row(prompt="x")))
    assert "the chat template refuses the messages (system, user)" in message
    assert "no system please; change the messages, or set data.chat_template to a template that accepts them" in message


def test_end_tokens_of_tokenizer_and_template(chat, with_template, chars):
    assert Template(chat, section()).end_token_ids == (chat.eos_token_id,)
    assert Template(chars, section()).end_token_ids == (chars.eos_token_id,)
    tokenizer = with_template(CHATML.replace("<|im_end|>", "<eos>"))
    assert Template(tokenizer, section()).end_token_ids == (
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<eos>"),
    )
