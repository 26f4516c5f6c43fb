"""Check that all roles have the policy's vocabulary, because every role reads the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rlhf.errors import ModelError
from rlhf.interfaces import ModelSpec
from rlhf_hub.published import model_folder

from rlhf_runtime.data.tokenizer import embedding_rows, has_tokenizer, vocabulary_size


def check_vocabularies(policy: ModelSpec, tokenizer: Any, others: Iterable[ModelSpec]) -> None:
    """Refuse a role whose model has another tokenizer than the policy, or an embedding that is too small for it.

    Ids that both tokenizers know must be the same token. A model without a tokenizer beside it is assumed to have the
    policy's. The size of its embedding is always compared.

    Args:
        tokenizer: of the policy.

    Raises ModelError naming the role and the first token that differs.
    """
    ours: dict[str, int] = tokenizer.get_vocab()
    own_rows = embedding_rows(tokenizer)
    largest = max(i for i in ours.values() if own_rows is None or i < own_rows)  # rows with other tokens are refused
    seen = {policy.path}
    for spec in others:
        if spec.path in seen:
            continue
        seen.add(spec.path)
        role = f"role {spec.role.name!r} ({spec.path})"
        remedy = "Every role reads the policy's tokens, so its model must have been trained on the same ones."
        rows = vocabulary_size(spec.path)
        if rows is not None and largest >= rows:
            raise ModelError(
                f"{role} has a vocabulary of {rows} tokens; the policy's tokenizer ({policy.path}) has ids up to "
                f"{largest}. {remedy}"
            )
        theirs = _vocabulary(spec)
        if theirs is None:
            continue
        name_of = {i: token for token, i in theirs.items()}
        other = sorted((i, token) for token, i in ours.items() if name_of.get(i, token) != token)
        if other:
            i, token = other[0]
            raise ModelError(
                f"{role} has another tokenizer than the policy ({policy.path}): {len(other)} of {len(ours)} ids are "
                f"other tokens, e.g. {i} is {token!r} to the policy and {name_of[i]!r} there. {remedy}"
            )


def _vocabulary(spec: ModelSpec) -> dict[str, int] | None:
    """None if there is no tokenizer beside the model. Raises ModelError if there is one that cannot be loaded."""
    place = model_folder(spec.path, code=spec.trust_remote_code)
    if not has_tokenizer(place):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the tokenizer of role {spec.role.name!r} ({spec.path}) cannot be loaded, so nobody knows whether it is "
            f"the policy's: {type(error).__name__}: {error}. Mend it, or copy the policy's files there."
        ) from error
    found: dict[str, int] = tokenizer.get_vocab()
    return found
