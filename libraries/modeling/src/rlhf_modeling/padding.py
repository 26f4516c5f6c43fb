"""Chooses the pad token of a model that scores sequences, for programs that pad batches.

Nothing is padded here. transformers' sequence classification reads the last token that is not the pad token, without
regard to the attention mask. If the pad token were also the end token, it would read the token before the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


_MEANT_FOR_PADDING = ("pad", "reserved", "unused")


def set_padding(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    """Set one pad token, which ends no text, in model and tokenizer, so that padded batches are scored at their last
    real tokens.

    The tokenizer's own, unless that ends texts (``ends``); else its unknown token; else a special token that is named
    for padding or as a spare one. Where there is none, the model gets no pad token: transformers then refuses batches
    of more than one instead of reading them wrongly.
    """
    found = pad_token(tokenizer, ends, _rows(module))
    module.config.pad_token_id = module.config.get_text_config().pad_token_id = found
    if found is not None and tokenizer.pad_token_id != found:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(found)


def pad_token(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], rows: int) -> int | None:
    """As :func:`set_padding` says; ``rows``: ids are below it."""
    special = {token: i for i, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)}
    added = {str(t.content): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    named = [i for t, i in {**special, **added}.items() if any(word in t.lower() for word in _MEANT_FOR_PADDING)]
    for candidate in (tokenizer.pad_token_id, tokenizer.unk_token_id, *sorted(named)):
        if candidate is not None and candidate not in ends and candidate < rows:
            return int(candidate)
    return None


def _rows(module: PreTrainedModel) -> int:
    embedding: Any = module.get_input_embeddings()
    return int(embedding.num_embeddings)
