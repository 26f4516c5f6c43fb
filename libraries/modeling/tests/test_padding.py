"""The pad token of models that score sequences: transformers reads the same scores in a padded batch."""

from __future__ import annotations

import pytest
import torch
from rlhf_modeling.pretrained import pad_token, set_padding
from rlhf_testing.tiny import tiny_reward_model
from transformers import AddedToken, AutoModelForSequenceClassification, AutoTokenizer

PAD, EOS, UNK = 0, 1, 2
ROWS = 99


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_reward_model(tmp_path_factory.mktemp("rm"), hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def tokenizer(path):
    return AutoTokenizer.from_pretrained(path)


def test_the_tokenizers_own_where_it_ends_no_text(tokenizer) -> None:
    assert pad_token(tokenizer, (EOS,), ROWS) == PAD
    assert pad_token(tokenizer, (EOS, PAD), ROWS) == UNK
    tokenizer.pad_token = None
    assert pad_token(tokenizer, (EOS, PAD), ROWS) == UNK


def test_a_spare_special_token_and_never_one_without_a_row(tokenizer) -> None:
    tokenizer.pad_token = tokenizer.unk_token = None
    assert pad_token(tokenizer, (EOS,), ROWS) == PAD  # by its name, "<pad>"
    assert pad_token(tokenizer, (EOS, PAD), ROWS) is None
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|reserved_7|>", special=True)])
    reserved = tokenizer.convert_tokens_to_ids("<|reserved_7|>")
    assert reserved == ROWS + 1
    assert pad_token(tokenizer, (EOS, PAD), reserved + 1) == reserved
    assert pad_token(tokenizer, (EOS, PAD), reserved) is None


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_reads_the_last_real_token_of_a_padded_batch(path, tokenizer, side: str) -> None:
    """This holds even if the tokenizer pads with the end token, which ends both texts."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    texts = ["2+3=5<eos>", "12+31=43<eos>"]

    def scores(**padded) -> torch.Tensor:
        with torch.no_grad():
            return model(**padded).logits[:, 0]

    reference = torch.cat([scores(**tokenizer(text, return_tensors="pt")) for text in texts])
    tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, EOS
    wrong = scores(**tokenizer(texts, padding=True, padding_side=side, return_tensors="pt"))
    assert not torch.allclose(wrong, reference, atol=1e-4)
    set_padding(model, tokenizer, (EOS,))
    assert tokenizer.pad_token_id == model.config.pad_token_id == UNK
    padded = tokenizer(texts, padding=True, padding_side=side, return_tensors="pt")
    assert padded["input_ids"].eq(UNK).sum() == len("12+31=43") - len("2+3=5")
    assert torch.allclose(scores(**padded), reference, atol=1e-5)


def test_without_any_token_to_pad_with_transformers_refuses_batches(path, tokenizer) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer.pad_token, tokenizer.unk_token = tokenizer.eos_token, None
    set_padding(model, tokenizer, (EOS, PAD))
    assert model.config.pad_token_id is None
    with pytest.raises(ValueError, match="batch sizes > 1"):
        model(torch.ones(2, 3, dtype=torch.int64))
