"""Tokenizers made on the spot: characters with and without a chat template, and byte pairs that merge across words."""

from __future__ import annotations

import pytest
from rlhf_testing.tiny import tiny_tokenizer


def load(path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


@pytest.fixture(scope="session")
def chars(tmp_path_factory):
    """One token per character, no chat template."""
    return load(tiny_tokenizer(tmp_path_factory.mktemp("chars")))


@pytest.fixture(scope="session")
def chat(tmp_path_factory):
    """One token per character, with the default chat template."""
    return load(tiny_tokenizer(tmp_path_factory.mktemp("chat"), chat_template="default"))


@pytest.fixture(scope="session")
def tokenizer_with(tmp_path_factory):
    """``tokenizer_with(template)``: one token per character, and this chat template."""
    path = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def use(template):
        tokenizer = load(path)
        tokenizer.chat_template = template
        return tokenizer

    return use


@pytest.fixture(scope="session")
def bpe(tmp_path_factory):
    """Byte pairs trained on text in which `: 4`, `n\\n` and the like are frequent, without any pre-tokenizer, so that
    merges cross the boundary of prompt and answer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, trainers
    from transformers import PreTrainedTokenizerFast

    text = ["Q: 2+2\nA: 4\nassistant\nThe answer is 42. user\nsystem\n <think>\n\n</think>\n\n x y z"] * 20
    alphabet = [chr(i) for i in range(32, 127)] + ["\n"]
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.Fuse()
    special = ["<eos>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")


@pytest.fixture
def with_template(bpe):
    def use(template):
        bpe.chat_template = template
        return bpe

    yield use
    bpe.chat_template = None
