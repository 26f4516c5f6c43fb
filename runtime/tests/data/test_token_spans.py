"""Which tokens are an answer's, for tokenizers and templates that make it hard to tell."""

from __future__ import annotations

import pytest
from rlhf.errors import DataError
from rlhf_runtime.data.template import Template
from rlhf_runtime.data.text_tokens import edges_are_between

from runtime.tests.data.template_cases import encoded, row, runs, section, talk


@pytest.mark.parametrize(
    ("offsets", "certain"),
    [
        ([(0, 2), (2, 5)], True),
        ([(0, 3), (3, 5)], False),  # over the edge at 2
        ([(0, 2), (3, 5)], False),  # who has the character at 2?
        ([(0, 1), (2, 5)], False),
        ([(0, 1), (2, 2), (2, 5)], False),  # one token has no characters
        ([(0, 2), (2, 3), (4, 5)], True),  # not at an edge
        ([(0, 2), (2, 3), (2, 3), (3, 5)], True),  # two bytes of one character
        ([(1, 2), (2, 5)], True),
    ],
)
def test_edges_between_tokens(offsets, certain):
    assert edges_are_between(offsets, [2, 5]) is certain


@pytest.fixture(scope="module")
def byte_level():
    """``byte_level(trim)``: byte pairs as GPT-2's; ``trim``: white space is no part of the reported characters, as for
    Pythia."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(trim: bool) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        backend.train_from_iterator(["def f():\n    return 1 and the    answer is", "42\n\n"] * 10, trainer)
        backend.post_processor = processors.ByteLevel(trim_offsets=trim)
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")

    return make


@pytest.mark.parametrize(
    ("prompt", "response", "expected"),
    [
        ("Q: ", "the", ["Q", ":", " ", "the", "<eos>"]),  # not " the", which sampling behind "Q: " never gives
        ("Q:", " the", ["Q", ":", " the", "<eos>"]),
        ("Q:\n", "    return 1\n  and  ", None),
        ("Q:   ", "   the    answer", None),
        ("Q: x", "  return 1", None),
        ("Q:\n\n", "42", ["Q", ":", "\n\n", "42", "<eos>"]),  # the whole text has two tokens for the two line breaks
        ("é", "é  é", None),
    ],
)
def test_white_space_of_an_answer_is_trained_on(byte_level, prompt, response, expected):
    """Whatever the tokenizer reports, the prompt's tokens are those that sampling sees, and all others are trained."""
    plain, trimmed = byte_level(False), byte_level(True)
    sequences = []
    for tokenizer in (plain, trimmed):
        template = Template(tokenizer, section())
        sequence = template.encode_demonstration(row(prompt=prompt, response=response)).sequences[0]
        prompt_ids = template.encode_prompt(row(prompt=prompt)).ids
        assert sequence.ids[: len(prompt_ids)] == prompt_ids
        assert sequence.loss_mask == [False] * len(prompt_ids) + [True] * (len(sequence.ids) - len(prompt_ids))
        assert tokenizer.decode(sequence.ids) == prompt + response + "<eos>"
        if expected is not None:
            assert [tokenizer.decode([i]) for i in sequence.ids] == expected
        sequences.append(sequence.ids)
    assert sequences[0] == sequences[1]


ENDS_LAST = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% if loop.last and m.role == 'assistant' %}<eos>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENDS_USERS = ENDS_LAST.replace("loop.last and m.role == 'assistant'", "loop.last or m.role == 'user'")
ENDS_BEHIND_A_LINE = ENDS_LAST.replace("<eos>", "{{ '\\n<eos>' }}").replace("loop.last and m", "m")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ENDS_LAST, ["b", "d<eos>"]),
        (ENDS_USERS, ["b", "d<eos>"]),
        (ENDS_BEHIND_A_LINE, ["b\n<eos>", "d\n<eos>"]),
    ],
)
def test_an_answer_without_an_end_token_does_not_reach_to_the_next_one(chat, monkeypatch, template, expected):
    monkeypatch.setattr(chat, "chat_template", template)
    assert runs(chat, encoded(chat, talk(*"abcd"), loss_on="assistant")) == expected


CHAT = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}{% endfor %}"
OPENED = CHAT + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
UNOPENED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[' + m.content + ']' }}{% else %}"
    "{{ ' ' + m.content + '<eos>' }}{% endif %}{% endfor %}"
)
"""As Mistral's: nothing opens an answer, and a space stands before it."""


@pytest.mark.parametrize("template", [OPENED, OPENED.replace("m.content +", "m.content | trim +")])
@pytest.mark.parametrize(
    "answer",
    [
        "<think>a b</think><answer>42</answer>",
        "<answer>\n42\n</answer>\n",
        "<b><i>x</i> </b>",
        "x<br>",
        "a\n\n<end> \n",
    ],
)
def test_a_tag_at_the_end_is_part_of_the_answer(chat, monkeypatch, template, answer):
    """And so is the end token behind it."""
    monkeypatch.setattr(chat, "chat_template", template)
    expected = answer.strip() if "trim" in template else answer
    assert runs(chat, encoded(chat, talk("<q>", answer) * 2, loss_on="assistant")) == [f"{expected}<eos>"] * 2


def test_a_tag_at_the_end_that_the_template_leaves_out_is_refused(chat, monkeypatch):
    monkeypatch.setattr(chat, "chat_template", OPENED.replace("m.content +", "m.content.replace('</b>', '') +"))
    with pytest.raises(DataError, match=r"leaves out the end of message 1 \(assistant\): '</b>'\. "):
        Template(chat, section()).encode_demonstration(row(prompt="q", response="<b>x</b>"))


@pytest.mark.parametrize("answer", ["42", "<think>so</think> 42", " 42 "])
def test_without_a_generation_prompt_an_answer_begins_after_the_policys_context(chat, monkeypatch, answer):
    monkeypatch.setattr(chat, "chat_template", UNOPENED)
    messages = talk("q", answer) * 2
    sequence = encoded(chat, messages, loss_on="assistant")
    assert runs(chat, sequence) == [f" {answer}<eos>"] * 2
    prompt_ids = Template(chat, section()).encode_prompt(row(prompt=messages[:3])).ids
    assert sequence.ids[: len(prompt_ids)] == prompt_ids
    assert sequence.loss_mask[len(prompt_ids) :] == [True] * (len(sequence.ids) - len(prompt_ids))


def test_without_a_generation_prompt_the_context_of_an_answer_must_be_the_policys(chat, monkeypatch):
    hint = UNOPENED.replace("{{ ' ' + m", "{% if loop.last %}(so){% endif %}{{ ' ' + m").replace("'[' + ", "'[' + ")
    asks = hint + "{% if add_generation_prompt %}{% endif %}"
    monkeypatch.setattr(
        chat, "chat_template", asks.replace("'[' + m.content", "('[[' if loop.last else '[') + m.content")
    )
    with pytest.raises(DataError, match=r"answers after .\[\[q\]., but .* after .\[q\]\(so\) ., so"):
        Template(chat, section()).encode_demonstration(row(prompt="q", response="42"))
