"""Prompts, observations, demonstrations: the tokens and masks, and the templates that are refused."""

from __future__ import annotations

from array import array

import pytest
from rlhf.errors import ConfigError, DataError
from rlhf.types import Row, Trajectory
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% else %}{% set r = '' %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.last %}{{ '<think>\\n' + r + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ c + '<|im_end|>\\n' }}{% else %}{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
"""As Qwen3's: only the last answer keeps its reasoning, and an empty block stands where it has none."""

TURNS = [
    {"role": "user", "content": "user"},  # texts that also stand in the template's own words
    {"role": "assistant", "content": "s"},
    {"role": "user", "content": "im_start"},
    {"role": "assistant", "content": "assistant\n"},
]


def row(**columns) -> Row:
    return Row(columns, "data", 0)


def section(**fields) -> DataSection:
    return DataSection(**fields)


def trained(tokenizer, sequence) -> str:
    """Text of the tokens under the mask."""
    ids = [i for i, on in zip(sequence.ids, sequence.loss_mask, strict=True) if on]
    return tokenizer.decode(ids, skip_special_tokens=False)


def runs(tokenizer, sequence) -> list[str]:
    """Texts of the stretches under the mask."""
    found, current = [], []
    for token, on in [*zip(sequence.ids, sequence.loss_mask, strict=True), (0, False)]:
        if on:
            current.append(token)
        elif current:
            found.append(tokenizer.decode(current, skip_special_tokens=False))
            current = []
    return found


def refused(call, error=DataError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


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
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    turn = Template(chat, section()).encode_prompt(row(prompt=messages))
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
    off = Template(tokenizer, section(template_kwargs={"enable_thinking": False})).encode_prompt(row(prompt="x"))
    assert tokenizer.decode(off.ids).endswith("assistant\n<think>\n\n</think>\n\n")


def test_template_kwargs_that_are_not_the_templates_are_refused(chat):
    kwargs = {"enable_thinking": True, "tokenize": True, "add_generation_prompt": False}
    with pytest.raises(ConfigError, match=r"^data.template_kwargs: add_generation_prompt, tokenize controls how"):
        Template(chat, section(template_kwargs=kwargs))


def test_tools_choose_among_templates_as_they_do_for_the_tokenizer(with_template):
    """A tokenizer may have several; answers are found in the one that is rendered."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    loud = GENERATION.replace("m.content + '<|im_end|>' }}{% endgen", "m.content | upper + '<|im_end|>' }}{% endgen")
    both = {"default": CHATML, "tool_use": "{{ tools[0].function.name }}" + loud}
    tokenizer = with_template(both)
    demonstration = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    for kwargs, front, said in (({}, "", "y"), ({"tools": tools}, "f", "Y")):
        [sequence] = (
            Template(tokenizer, section(template_kwargs=kwargs, messages="messages"))
            .encode_demonstration(row(**demonstration))
            .sequences
        )
        assert tokenizer.decode(sequence.ids) == (
            f"{front}<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{said}<|im_end|>"
        )
        own = [i for i, trained in zip(sequence.ids, sequence.loss_mask, strict=True) if trained]
        assert tokenizer.decode(own) == f"{said}<|im_end|>"


def test_begin_token_where_the_tokenizer_puts_one(bpe):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(bpe._tokenizer).from_str(bpe._tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<eos>")
    template = Template(tokenizer, section())
    prompt = template.encode_prompt(row(prompt="x"))
    assert prompt.ids[0] == 0
    example = template.encode_demonstration(row(prompt="x", response="y")).sequences[0]
    assert example.ids[: len(prompt.ids)] == prompt.ids


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
            "a system message of its own and data.system",
        ),
    ],
)
def test_prompts_that_are_refused(chat, prompt, expected):
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
    ],
)
def test_chat_options_without_a_chat_template(chars, fields, expected):
    assert expected in refused(lambda: Template(chars, section(**fields)), ConfigError)


@pytest.mark.parametrize("fields", [{"input_template": "{q}"}, {"add_eos": False}])
def test_plain_options_with_a_chat_template(chat, fields):
    message = refused(lambda: Template(chat, section(**fields)), ConfigError)
    assert "is for plain text, but a chat template is used; set data.template = 'plain'" in message


# --------------------------------------------------------------------------------------- observations


def test_observations_continue_as_the_template_would_have_rendered(chat, with_template):
    for tokenizer, end in ((chat, "<eos>"), (with_template(CHATML), "<|im_end|>")):
        template = Template(tokenizer, section())
        prompt = template.encode_prompt(row(prompt="a")).ids
        sampled = tokenizer("4!" + end, add_special_tokens=False)["input_ids"]
        ids = prompt + array("i", sampled) + template.encode_observation("ok?").ids
        turns = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "4!"},
            {"role": "user", "content": "ok?"},
        ]
        expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        cut = prompt + array("i", sampled[:-1]) + template.encode_observation("ok?", closed=False).ids
        assert tokenizer.decode(cut, skip_special_tokens=False) == expected
        assert template.encode_observation("ok?").text.strip().endswith("ok?" if tokenizer is chat else "assistant")


def test_plain_observations_are_the_text(chars):
    assert Template(chars, section()).encode_observation("higher").text == "higher"


def test_opening_is_in_the_users_message(chat, chars):
    opening = Template(chat, section()).encode_opening(row(prompt="a"), "Guess.")
    assert [chat.decode(t.ids) for t in opening] == ["<|user|>a\n\nGuess.<eos><|assistant|>"]
    assert [t.text for t in Template(chat, section()).encode_opening(row(prompt="a"), "")] == ["a"]
    assert [t.text for t in Template(chars, section()).encode_opening(row(prompt="a"), "b")] == ["a", "b"]


def test_a_trajectory_that_failed_before_its_first_turn_has_no_prompt(chars):
    assert Template(chars, section()).prompt_of(Trajectory(row(prompt="a"), [], (0, 0), status="failed")) is None


def test_an_opening_joins_a_users_message_and_follows_any_other(chat):
    template, user = Template(chat, section()), {"role": "user", "content": "a"}

    def opened(*messages):
        [turn] = template.encode_opening(row(prompt=list(messages)), "Guess.")
        return turn.ids

    def asked(*messages):
        return template.encode_prompt(row(prompt=list(messages))).ids

    rules = {"role": "system", "content": "Rules."}
    assert opened(user) == asked({**user, "content": "a\n\nGuess."})
    assert opened({**user, "content": ""}) == asked({**user, "content": "Guess."}), "no blank line after nothing"
    assert opened(rules) == asked(rules, {**user, "content": "Guess."})


def test_turns_of_an_environment_keep_the_messages_that_a_template_wrote(chat, chars):
    template, rules = Template(chat, section()), {"role": "system", "content": "Rules."}
    [turn] = template.encode_opening(row(prompt=[rules, {"role": "user", "content": "a"}]), "Guess.")
    assert turn.messages == (("system", "Rules."), ("user", "a\n\nGuess."))
    assert template.encode_observation("higher").messages == (("user", "higher"),)
    assert template.encode_prompt(row(prompt="a")).messages == (), "samples are saved with their row's prompt"
    assert Template(chars, section()).encode_observation("higher").messages == ()


@pytest.mark.parametrize(
    ("kwargs", "what"), [({}, "drops its reasoning"), ({"enable_thinking": False}, "writes it otherwise")]
)
def test_templates_that_rewrite_history_are_refused_for_several_turns(with_template, kwargs, what):
    template = Template(with_template(THINKING), section(template_kwargs=kwargs))
    template.encode_prompt(row(prompt="one turn is fine"))
    for call in (template.check_multi_turn, lambda: template.encode_observation("x")):
        message = refused(call)
        assert "the chat template rewrites history" in message
        assert what in message
        assert "keep" in message


def test_a_template_that_refuses_the_messages_says_why(with_template):
    tokenizer = with_template(
        "{{ raise_exception('no system please') if messages[0].role == 'system' else messages[0].content }}"
    )
    message = refused(lambda: Template(tokenizer, section(system="S")).encode_prompt(row(prompt="x")))
    assert "the chat template refuses the messages (system, user)" in message
    assert "no system please" in message


def test_end_tokens_of_tokenizer_and_template(chat, with_template, chars):
    assert Template(chat, section()).end_token_ids == (chat.eos_token_id,)
    assert Template(chars, section()).end_token_ids == (chars.eos_token_id,)
    tokenizer = with_template(CHATML.replace("<|im_end|>", "<eos>"))
    assert Template(tokenizer, section()).end_token_ids == (
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<eos>"),
    )


# ------------------------------------------------------------------------------------- demonstrations


def test_plain_completion_with_and_without_end_token(chars):
    example = Template(chars, section()).encode_demonstration(row(prompt="1+1=", response="2"))
    assert chars.decode(example.sequences[0].ids) == "1+1=2<eos>"
    assert trained(chars, example.sequences[0]) == "2<eos>"
    example = Template(chars, section(add_eos=False)).encode_demonstration(row(prompt="1+1=", response="2"))
    assert trained(chars, example.sequences[0]) == "2"


def test_prompt_tokens_are_those_that_sampling_sees(bpe):
    """Byte pairs merge over the boundary when prompt and answer are tokenised together."""
    template, prompt, answer = Template(bpe, section()), "Q: 2+2\nA:", " 4\nassistant"
    together = bpe(prompt + answer, add_special_tokens=False)["input_ids"]
    seen = template.encode_prompt(row(prompt=prompt)).ids
    assert together[: len(seen)] != list(seen)  # the case is a real one
    sequence = template.encode_demonstration(row(prompt=prompt, response=answer)).sequences[0]
    assert sequence.ids[: len(seen)] == seen
    assert trained(bpe, sequence) == answer + "<|im_end|>"
    assert bpe.decode(sequence.ids) == prompt + answer + "<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_chat_completion_and_all_answers(with_template, template):
    tokenizer = with_template(template)
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    for loss_on, expected in (
        ("completion", ["assistant\n<|im_end|>"]),
        ("assistant", ["s<|im_end|>", "assistant\n<|im_end|>"]),
        ("all", [text]),
    ):
        encoder = Template(tokenizer, section(messages="m", loss_on=loss_on))
        sequence = encoder.encode_demonstration(row(m=TURNS)).sequences[0]
        # Behind the last end token stands what no sample ends with: a line break.
        assert tokenizer.decode(sequence.ids) == (text if loss_on == "all" else text.removesuffix("\n"))
        assert runs(tokenizer, sequence) == expected


def test_chat_prompt_tokens_are_those_that_sampling_sees(with_template):
    tokenizer = with_template(CHATML)
    template = Template(tokenizer, section())
    seen = template.encode_prompt(row(prompt="x")).ids
    for answer in ("\nThe answer", "The answer is 42.", " 4", "\n\n"):
        if not answer.strip():
            continue
        sequence = template.encode_demonstration(row(prompt="x", response=answer)).sequences[0]
        assert sequence.ids[: len(seen)] == seen
        assert not any(sequence.loss_mask[: len(seen)])


def test_prompt_and_response_columns_may_hold_messages(chat):
    template = Template(chat, section())
    response = [{"role": "assistant", "content": "b"}]
    example = template.encode_demonstration(row(prompt=[{"role": "user", "content": "a"}], response=response))
    assert runs(chat, example.sequences[0]) == ["b<eos>"]


def test_templates_that_trim_are_followed(with_template):
    tokenizer = with_template(CHATML.replace("m.content", "m.content | trim"))
    example = Template(tokenizer, section()).encode_demonstration(row(prompt=" a ", response=" b \n"))
    assert runs(tokenizer, example.sequences[0]) == ["b<|im_end|>"]


def test_reasoning_of_the_last_answer_is_trained_on(with_template):
    tokenizer = with_template(THINKING)
    template = Template(tokenizer, section())
    full = "<think>\nI count.\n</think>\n\n4"
    sequence = template.encode_demonstration(row(prompt="2+2", response=full)).sequences[0]
    assert runs(tokenizer, sequence) == [full + "<|im_end|>"]
    # Without reasoning the template writes an empty block, which the policy has to produce itself.
    sequence = template.encode_demonstration(row(prompt="2+2", response="4")).sequences[0]
    assert runs(tokenizer, sequence) == ["<think>\n\n</think>\n\n4<|im_end|>"]
    # Where the generation prompt already holds the empty block, it is given and not trained on.
    off = Template(tokenizer, section(template_kwargs={"enable_thinking": False}))
    assert runs(tokenizer, off.encode_demonstration(row(prompt="2+2", response="4")).sequences[0]) == ["4<|im_end|>"]


def test_stripped_reasoning_of_earlier_answers_is_refused_only_where_it_is_trained_on(with_template):
    tokenizer = with_template(THINKING)
    turns = [*TURNS[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\ns"}, *TURNS[2:]]
    last = Template(tokenizer, section(messages="m")).encode_demonstration(row(m=turns)).sequences[0]
    assert runs(tokenizer, last)[0].endswith("assistant\n<|im_end|>")
    everything = Template(tokenizer, section(messages="m", loss_on="assistant"))
    message = refused(lambda: everything.encode_demonstration(row(m=turns)))
    assert "the chat template leaves out part of message 1 (assistant): 'hm'" in message
    assert "strips the reasoning of earlier answers" in message
    assert 'data.loss_on = "completion"' in message


def test_answers_in_a_context_that_the_policy_never_sees_are_refused(with_template):
    """Without thinking, Qwen3's empty block is part of what the policy is given, and only before the last answer."""
    tokenizer = with_template(THINKING)
    off = {"messages": "m", "template_kwargs": {"enable_thinking": False}}
    last = Template(tokenizer, section(**off)).encode_demonstration(row(m=TURNS)).sequences[0]
    assert runs(tokenizer, last) == ["assistant\n<|im_end|>"]
    seen = Template(tokenizer, section(**off)).encode_prompt(row(prompt=TURNS[:3])).ids
    assert last.ids[: len(seen)] == seen
    message = refused(
        lambda: Template(tokenizer, section(**off, loss_on="assistant")).encode_demonstration(row(m=TURNS))
    )
    assert "the policy is given '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' before it answers" in message
    assert "writes message 1 (assistant) after " in message
    both = Template(tokenizer, section(messages="m", loss_on="assistant")).encode_demonstration(row(m=TURNS))
    assert runs(tokenizer, both.sequences[0]) == ["s<|im_end|>", "<think>\n\n</think>\n\nassistant\n<|im_end|>"]
    # A head that opens the reasoning, and answers that are written without any.
    opens = CHATML.replace(
        "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    assert opens != CHATML
    tokenizer = with_template(opens)
    message = refused(lambda: Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response="4")))
    assert "the policy is given '<|im_start|>assistant\\n<think>\\n' before it answers" in message
    assert Template(tokenizer, section()).end_token_ids == (tokenizer.eos_token_id,)  # sampling asks nothing of answers
    given = "<think>\nhm\n</think>\n\n4"
    whole = Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response=given)).sequences[0]
    assert runs(tokenizer, whole) == ["hm\n</think>\n\n4<|im_end|>"]


def test_templates_that_change_the_text_are_refused(with_template):
    tokenizer = with_template(CHATML.replace("m.content", "m.content | replace('4', 'four')"))
    message = refused(lambda: Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response="4")))
    assert "the chat template changes the text of messages" in message
    assert "{% generation %}" in message


def test_generation_blocks_must_be_one_per_answer(with_template):
    tokenizer = with_template("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}x{% endgeneration %}")
    message = refused(lambda: Template(tokenizer, section(messages="m")).encode_demonstration(row(m=TURNS)))
    assert "marks 1 passages with {% generation %} for 2 assistant messages" in message


def test_a_row_that_a_template_with_generation_blocks_refuses_is_bad(with_template):
    """Not an error of its own kind: `data.bad_rows = "drop"` leaves it out, and else its file and line are named."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no ' + bos_token) }}{% endif %}" + GENERATION
    template = Template(with_template(strict), section(messages="m", template_kwargs={"bos_token": "sy"}))
    assert template.encode_demonstration(row(m=TURNS)).sequences[0].loss_mask[-1]
    message = refused(lambda: template.encode_demonstration(row(m=[{"role": "system", "content": "s"}, *TURNS])))
    assert "the chat template refuses the messages (system, user, assistant, user, assistant): TemplateError" in message
    assert "no sy" in message


def test_conversations_that_are_refused(chat):
    template = Template(chat, section(messages="m"))
    message = refused(lambda: template.encode_demonstration(row(m=TURNS[:3])))
    assert "must end with the assistant's answer, got the roles user, assistant, user" in message
    empty = [*TURNS[:3], {"role": "assistant", "content": " "}]
    assert "message 3 (assistant): the answer is empty" in refused(lambda: template.encode_demonstration(row(m=empty)))


def test_continued_pre_training_needs_no_prompt(chars):
    sequence = Template(chars, section(loss_on="all")).encode_demonstration(row(response="abc")).sequences[0]
    assert (chars.decode(sequence.ids), all(sequence.loss_mask)) == ("abc<eos>", True)


def test_pairs(chat, chars):
    for tokenizer, expected in ((chat, ["g<eos>", "b<eos>"]), (chars, ["g<eos>", "b<eos>"])):
        example = Template(tokenizer, section()).encode_pair(row(prompt="p", chosen="g", rejected="b"))
        assert [s.role for s in example.sequences] == [0, 1]
        assert [trained(tokenizer, s) for s in example.sequences] == expected
    whole = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "g"}]
    example = Template(chat, section()).encode_pair(
        row(chosen=whole, rejected=[*whole[:1], {**whole[1], "content": "b"}])
    )
    assert [trained(chat, s) for s in example.sequences] == ["g<eos>", "b<eos>"]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_a_sequence_ends_where_a_sample_would(with_template, template):
    """A reward model reads its score at the last token: the same one in training and of what a policy sampled."""
    tokenizer = with_template(template)
    encoder = Template(tokenizer, section())
    for sequence in encoder.encode_pair(row(prompt="p", chosen="g", rejected="b")).sequences:
        assert sequence.ids[-1] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert sequence.loss_mask[-1]


def test_answers_of_several_messages_that_differ_early_are_refused(chat):
    """Behind a prompt as in whole conversations: only the last answers would be trained on, in contexts that differ."""
    a, b, more = ({"role": r, "content": c} for r, c in (("assistant", "g"), ("assistant", "b"), ("user", "u")))
    columns = {"prompt": "p", "chosen": [a, more, b], "rejected": [b, more, a]}
    message = refused(lambda: Template(chat, section()).encode_pair(row(**columns)))
    assert "the chosen and the rejected messages differ before their last answers" in message
    assert 'data.loss_on = "assistant"' in message
    every = Template(chat, section(loss_on="assistant")).encode_pair(row(**columns))
    assert [runs(chat, s) for s in every.sequences] == [["g<eos>", "b<eos>"], ["b<eos>", "g<eos>"]]
    same = {**columns, "rejected": [a, more, a]}
    last = Template(chat, section()).encode_pair(row(**same))
    assert [runs(chat, s) for s in last.sequences] == [["b<eos>"], ["g<eos>"]]
    one = {**columns, "rejected": "b"}
    assert "differ before their last answers" in refused(lambda: Template(chat, section()).encode_pair(row(**one)))


def test_begin_and_end_tokens_in_a_text_are_not_repeated(bpe):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(bpe._tokenizer).from_str(bpe._tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<eos>")
    template = Template(tokenizer, section())
    for begin in ("", "<eos>"):
        assert template.encode_prompt(row(prompt=begin + "x")).ids == template.encode_prompt(row(prompt="x")).ids
        for end in ("", "<|im_end|>"):
            sequence = template.encode_demonstration(row(prompt=begin + "x", response="y" + end)).sequences[0]
            assert tokenizer.decode(sequence.ids) == "<eos>xy<|im_end|>"
            assert trained(tokenizer, sequence) == "y<|im_end|>"
        steps = {"prompt": begin + "x", "completions": ["y"], "labels": [1]}
        assert tokenizer.decode(template.encode_steps(row(**steps)).sequences[0].ids) == "<eos>xy\n"


def test_slow_tokenizers_have_the_same_masks(with_template, monkeypatch):
    tokenizer = with_template(CHATML)
    template = Template(tokenizer, section(messages="m", loss_on="assistant"))
    fast = template.encode_demonstration(row(m=TURNS)).sequences[0]
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    slow = template.encode_demonstration(row(m=TURNS)).sequences[0]
    assert runs(tokenizer, slow) == runs(tokenizer, fast)


def spaced(scheme: str):
    """A tokenizer that writes a space (``▁``) before the text that it is given, as SentencePiece does: before every
    text between special tokens (``legacy``), or as ``Metaspace`` with that scheme does."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("▁", "4"), ("▁4", "2"), ("4", "2"), ("▁", "A")]
    texts = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "\n", "▁", *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, merges))
    if scheme == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("scheme", ["legacy", "first", "always", "never"])
def test_no_space_is_inserted_between_a_prompt_and_a_separately_tokenised_answer(scheme):
    tokenizer = spaced(scheme)
    template = Template(tokenizer, section())
    asked = template.encode_prompt(row(prompt="A: ")).ids
    sequence = template.encode_demonstration(row(prompt="A: ", response="42")).sequences[0]
    first = "A" if scheme == "never" else "▁A"
    assert tokenizer.convert_ids_to_tokens(sequence.ids) == [first, ":", "▁", "42", "</s>"]
    assert sequence.loss_mask == [False, False, False, True, True]
    assert sequence.ids[: len(asked)] == asked
    assert tokenizer.decode(sequence.ids) == "A: 42</s>"
    # where the space is the answer's, one text has the tokens that sampling finds anyway
    sequence = template.encode_demonstration(row(prompt="A:", response=" 42")).sequences[0]
    assert tokenizer.convert_ids_to_tokens(sequence.ids) == [first, ":", "▁42", "</s>"]
    assert tokenizer.convert_ids_to_tokens(template.encode_observation("42").ids) == ["42"]
    assert tokenizer.convert_ids_to_tokens(template.encode_observation(" 42").ids) == ["▁42"]


@pytest.mark.parametrize("scheme", ["legacy", "first", "always", "never"])
def test_an_observation_has_the_tokens_of_the_whole_conversation(scheme):
    tokenizer = spaced(scheme)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    template = Template(tokenizer, section())
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "42"}, {"role": "user", "content": "4"}]
    answered = template.encode_demonstration(row(prompt="A", response="42")).sequences[0].ids
    assert answered + template.encode_observation("4").ids == template.encode_prompt(row(prompt=turns)).ids


def test_a_continuation_with_uncertain_tokens_is_refused():
    tokenizer = spaced("legacy")
    backend = tokenizer.backend_tokenizer
    merges = [(a, "4") for a in (".", "x", "\n")]
    texts = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "\n", "▁", *(a + b for a, b in merges)]
    backend.model = type(backend.model)({text: i for i, text in enumerate(texts)}, merges)
    template = Template(tokenizer, section())
    message = refused(lambda: template.encode_observation("42"))
    assert (
        "writes a space before the texts that it is given, so the tokens of '42' behind '.' cannot be told" in message
    )
    assert "end the prompt before the space" in message
