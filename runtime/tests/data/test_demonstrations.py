"""Demonstrations and pairs: the tokens and masks of answers, and the templates that are refused."""

from __future__ import annotations

import pytest
from rlhf_runtime.data.template import Template

from runtime.tests.data.template_cases import (
    CHATML,
    GENERATION,
    LAST_END,
    OPENED,
    PARTS,
    THINKING,
    TURNS,
    TWO_ENDS,
    UNNAMED,
    encoded,
    refused,
    row,
    runs,
    section,
    trained,
)


def test_plain_completion_with_and_without_end_token(chars):
    example = Template(chars, section()).encode_demonstration(row(prompt="1+1=", response="2"))
    assert chars.decode(example.sequences[0].ids) == "1+1=2<eos>"
    assert trained(chars, example.sequences[0]) == "2<eos>"
    example = Template(chars, section(add_eos=False)).encode_demonstration(row(prompt="1+1=", response="2"))
    assert trained(chars, example.sequences[0]) == "2"


def test_prompt_tokens_are_those_that_sampling_sees(bpe):
    """Byte pairs merge over the boundary when prompt and answer are tokenised together."""
    template, prompt, answer = Template(bpe, section()), "Q: 2+2\nA:", " 4\nassistant"
    joint = bpe(prompt + answer, add_special_tokens=False)["input_ids"]
    prompt_ids = template.encode_prompt(row(prompt=prompt)).ids
    assert joint[: len(prompt_ids)] != list(prompt_ids)  # the case is a real one
    sequence = template.encode_demonstration(row(prompt=prompt, response=answer)).sequences[0]
    assert sequence.ids[: len(prompt_ids)] == prompt_ids
    assert trained(bpe, sequence) == answer + "<|im_end|>"
    assert bpe.decode(sequence.ids) == prompt + answer + "<|im_end|>"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        *((template, "<|im_end|>") for template in (CHATML, GENERATION, OPENED)),
        *((template, "<eos>") for template in (UNNAMED, PARTS, LAST_END)),
        (TWO_ENDS, "<eos><|im_end|>"),
    ],
)
def test_chat_completion_and_all_answers(with_template, template, end):
    tokenizer = with_template(template)
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    for loss_on, expected in (
        ("completion", [f"assistant\n{end}"]),
        ("assistant", [f"s{end}", f"assistant\n{end}"]),
        ("all", [text]),
    ):
        sequence = encoded(tokenizer, TURNS, loss_on=loss_on)
        # Behind the last end token stands what no sample ends with, such as a line break.
        assert tokenizer.decode(sequence.ids) == (text if loss_on == "all" else text[: text.rindex(end) + len(end)])
        assert runs(tokenizer, sequence) == expected


def test_chat_prompt_tokens_are_those_that_sampling_sees(with_template):
    tokenizer = with_template(CHATML)
    template = Template(tokenizer, section())
    prompt_ids = template.encode_prompt(row(prompt="x")).ids
    for answer in ("\nThe answer", "The answer is 42.", " 4"):
        sequence = template.encode_demonstration(row(prompt="x", response=answer)).sequences[0]
        assert sequence.ids[: len(prompt_ids)] == prompt_ids
        assert not any(sequence.loss_mask[: len(prompt_ids)])


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
    no_thinking = Template(tokenizer, section(template_kwargs={"enable_thinking": False}))
    assert runs(tokenizer, no_thinking.encode_demonstration(row(prompt="2+2", response="4")).sequences[0]) == [
        "4<|im_end|>"
    ]


def test_stripped_reasoning_of_earlier_answers_is_refused_only_where_it_is_trained_on(with_template):
    tokenizer = with_template(THINKING)
    turns = [*TURNS[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\ns"}, *TURNS[2:]]
    last = encoded(tokenizer, turns)
    assert runs(tokenizer, last)[0].endswith("assistant\n<|im_end|>")
    message = refused(lambda: encoded(tokenizer, turns, loss_on="assistant"))
    assert "the chat template leaves out part of message 1 (assistant): 'hm'" in message
    assert "strips the reasoning of earlier answers" in message
    assert 'data.loss_on = "completion"' in message


def test_answers_in_a_context_that_the_policy_never_sees_are_refused(with_template):
    """Without thinking, Qwen3's empty block is part of what the policy is given, and only before the last answer."""
    tokenizer = with_template(THINKING)
    no_thinking = {"template_kwargs": {"enable_thinking": False}}
    last = encoded(tokenizer, TURNS, **no_thinking)
    assert runs(tokenizer, last) == ["assistant\n<|im_end|>"]
    prompt_ids = Template(tokenizer, section(**no_thinking)).encode_prompt(row(prompt=TURNS[:3])).ids
    assert last.ids[: len(prompt_ids)] == prompt_ids
    message = refused(lambda: encoded(tokenizer, TURNS, **no_thinking, loss_on="assistant"))
    assert "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n', but the chat template writes" in message
    assert "writes message 1 (assistant) after " in message
    conversation = encoded(tokenizer, TURNS, loss_on="assistant")
    assert runs(tokenizer, conversation) == ["s<|im_end|>", "<think>\n\n</think>\n\nassistant\n<|im_end|>"]
    # A head that opens the reasoning, and answers that are written without any.
    opens = CHATML.replace(
        "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    assert opens != CHATML
    tokenizer = with_template(opens)
    message = refused(lambda: Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response="4")))
    assert "<|im_start|>assistant\\n<think>\\n', but the chat template writes" in message
    assert Template(tokenizer, section()).end_token_ids == (tokenizer.eos_token_id,)  # sampling asks nothing of answers
    response = "<think>\nhm\n</think>\n\n4"
    sequence = Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response=response)).sequences[0]
    assert runs(tokenizer, sequence) == ["hm\n</think>\n\n4<|im_end|>"]
    # No generation prompt after a result: the policy goes on in its turn, but a whole conversation begins another one.
    same_turn = CHATML.replace("if add_gen", "if messages[-1].role == 'user' and add_gen")
    assert same_turn != CHATML
    turns = [*TURNS[:1], {"role": "tool", "content": "3"}, TURNS[1]]
    message = refused(lambda: encoded(with_template(same_turn), turns))
    assert "answers after '\\n<|im_start|>tool\\n3<|im_end|>\\n', but the chat template writes" in message
    assert "tool\\n3<|im_end|>\\n<|im_start|>assistant\\n', so the policy would be trained" in message


def test_templates_that_change_the_text_are_refused(with_template):
    tokenizer = with_template(CHATML.replace("m.content", "m.content | replace('4', 'four')"))
    message = refused(lambda: Template(tokenizer, section()).encode_demonstration(row(prompt="2+2", response="4")))
    assert "the chat template changes the text of messages" in message
    assert "{% generation %}" in message
    answer = {"role": "assistant", "content": "4", "thinking": "hm"}  # a field that the template does not read
    message = refused(
        lambda: Template(with_template(CHATML), section()).encode_demonstration(row(prompt="2+2", response=[answer]))
    )
    assert "'hm'. Use a template that writes all of content, thinking (data.chat_template), or rename" in message


def test_generation_blocks_must_be_one_per_answer(with_template):
    tokenizer = with_template("{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}x{% endgeneration %}")
    message = refused(lambda: encoded(tokenizer, TURNS))
    assert "marks 1 passages with {% generation %} for 2 assistant messages" in message


def test_a_row_that_a_template_with_generation_blocks_refuses_is_bad(with_template):
    """Not an error of its own kind: `data.bad_rows = "drop"` leaves it out, and else its file and line are named."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no ' + bos_token) }}{% endif %}" + GENERATION
    template = Template(with_template(strict), section(messages="m", template_kwargs={"bos_token": "sy"}))
    assert template.encode_demonstration(row(m=TURNS)).sequences[0].loss_mask[-1]
    message = refused(lambda: template.encode_demonstration(row(m=[{"role": "system", "content": "s"}, *TURNS])))
    assert "the chat template refuses the messages (system, user, assistant, user, assistant): TemplateError" in message
    assert "no sy" in message


def test_continued_pre_training_needs_no_prompt(chars):
    sequence = Template(chars, section(loss_on="all")).encode_demonstration(row(response="abc")).sequences[0]
    assert (chars.decode(sequence.ids), all(sequence.loss_mask)) == ("abc<eos>", True)


def test_pairs(chat, chars):
    for tokenizer, expected in ((chat, ["g<eos>", "b<eos>"]), (chars, ["g<eos>", "b<eos>"])):
        example = Template(tokenizer, section()).encode_pair(row(prompt="p", chosen="g", rejected="b"))
        assert [s.role for s in example.sequences] == [0, 1]
        assert [trained(tokenizer, s) for s in example.sequences] == expected
    dialogue = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "g"}]
    example = Template(chat, section()).encode_pair(
        row(chosen=dialogue, rejected=[*dialogue[:1], {**dialogue[1], "content": "b"}])
    )
    assert [trained(chat, s) for s in example.sequences] == ["g<eos>", "b<eos>"]


def test_answers_of_several_messages_that_differ_early_are_refused(chat):
    """Behind a prompt as in whole conversations: only the last answers would be trained on, in contexts that differ."""
    a, b, user = ({"role": r, "content": c} for r, c in (("assistant", "g"), ("assistant", "b"), ("user", "u")))
    columns = {"prompt": "p", "chosen": [a, user, b], "rejected": [b, user, a]}
    message = refused(lambda: Template(chat, section()).encode_pair(row(**columns)))
    assert "the chosen and the rejected messages differ before their last answers" in message
    assert 'data.loss_on = "assistant"' in message
    every = Template(chat, section(loss_on="assistant")).encode_pair(row(**columns))
    assert [runs(chat, s) for s in every.sequences] == [["g<eos>", "b<eos>"], ["b<eos>", "g<eos>"]]
    prefix_columns = {**columns, "rejected": [a, user, a]}
    last = Template(chat, section()).encode_pair(row(**prefix_columns))
    assert [runs(chat, s) for s in last.sequences] == [["b<eos>"], ["g<eos>"]]
    text_columns = {**columns, "rejected": "b"}
    assert "differ before their last answers" in refused(
        lambda: Template(chat, section()).encode_pair(row(**text_columns))
    )
