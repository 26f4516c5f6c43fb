"""Tokens where a text is joined to another: begin and end tokens, spaces, slow tokenizers."""

from __future__ import annotations

import pytest
from rlhf_runtime.data.template import Template

from runtime.tests.data.template_cases import CHATML, TURNS, refused, row, runs, section, trained


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
    prompt_ids = template.encode_prompt(row(prompt="A: ")).ids
    sequence = template.encode_demonstration(row(prompt="A: ", response="42")).sequences[0]
    first = "A" if scheme == "never" else "▁A"
    assert tokenizer.convert_ids_to_tokens(sequence.ids) == [first, ":", "▁", "42", "</s>"]
    assert sequence.loss_mask == [False, False, False, True, True]
    assert sequence.ids[: len(prompt_ids)] == prompt_ids
    assert tokenizer.decode(sequence.ids) == "A: 42</s>"
    # where the space is the answer's, one text has the tokens that sampling finds anyway
    sequence = template.encode_demonstration(row(prompt="A:", response=" 42")).sequences[0]
    assert tokenizer.convert_ids_to_tokens(sequence.ids) == [first, ":", "▁42", "</s>"]
    assert tokenizer.convert_ids_to_tokens(template.observations.encode("42").ids) == ["42"]
    assert tokenizer.convert_ids_to_tokens(template.observations.encode(" 42").ids) == ["▁42"]


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
    assert answered + template.observations.encode("4").ids == template.encode_prompt(row(prompt=turns)).ids


def test_a_continuation_with_uncertain_tokens_is_refused():
    tokenizer = spaced("legacy")
    backend = tokenizer.backend_tokenizer
    merges = [(a, "4") for a in (".", "x", "\n")]
    texts = ["<s>", "</s>", *(chr(c) for c in range(33, 127)), "\n", "▁", *(a + b for a, b in merges)]
    backend.model = type(backend.model)({text: i for i, text in enumerate(texts)}, merges)
    template = Template(tokenizer, section())
    message = refused(lambda: template.observations.encode("42"))
    assert "adds a space before each text, so the tokens of '42' after '.' cannot be determined" in message
    assert "end the prompt before the space" in message
