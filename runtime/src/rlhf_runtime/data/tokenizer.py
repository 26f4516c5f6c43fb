"""Load a tokenizer, with clear errors if that fails, and compare it with the tokenizers of the run's other models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf.errors import ConfigError, ModelError
from rlhf.interfaces import ModelSpec
from rlhf.interfaces.tokens import Tokens
from rlhf.types import Sampling
from rlhf_hub.hub import hub_name
from rlhf_hub.published import require_folder, settings_of, tokenizer_folder

ENLARGE = "Enlarge the embedding (`model.resize_token_embeddings(len(tokenizer))`), or use the model's own tokenizer."
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's folder or hub name.

    Raises ModelError: no such folder, a folder without a tokenizer, one that transformers cannot load, or one
    without an end token.
    """
    from transformers import AutoTokenizer

    if hub_name(path) is None:
        require_folder(path)
    place = tokenizer_folder(path, code=trust_remote_code)
    if not has_tokenizer(place):
        if not (Path(place) / "config.json").is_file():
            raise ModelError(
                f"{path} is not a model: it holds neither a config.json nor a tokenizer. `rlhf export` writes the "
                "model of a run's checkpoint."
            )
        raise ModelError(
            f"{path} holds no tokenizer (none of {', '.join(_FILES)}). Copy the tokenizer's files beside the model "
            "(`tokenizer.save_pretrained(folder)`)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as error:  # of many classes; each means that there is no usable tokenizer
        raise ModelError(f"cannot load the tokenizer of {path}: {type(error).__name__}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path} has no end token, so no answer could end: set `eos_token` in its "
            "tokenizer_config.json"
        )
    rows = embedding_rows(tokenizer)
    for name, token in (("begin", tokenizer.bos_token_id), ("end", tokenizer.eos_token_id)):
        if rows is not None and token is not None and token >= rows:
            raise ModelError(
                f"the {name} token of the tokenizer of {path} has id {token}; the model's embedding has {rows} rows, "
                f"so ids are 0 to {rows - 1}. {ENLARGE}"
            )
    longest = tokenizer.model_max_length
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ModelError(
            f"the tokenizer of {path} has model_max_length = {longest!r} in its tokenizer_config.json; allowed is a "
            "number of tokens. Correct it, or remove it."
        )
    return tokenizer


def embedding_rows(tokenizer: Any) -> int | None:
    """Number of rows of the embedding of the model in the tokenizer's folder. None if its ``config.json`` does not
    say."""
    place = str(tokenizer.name_or_path or "")
    return vocabulary_size(place) if (Path(place) / "config.json").is_file() else None


def vocabulary_size(model: str) -> int | None:
    """``vocab_size`` of a model's ``config.json``. None if the file does not have it or cannot be read; loading the
    model then raises a better error."""
    try:
        settings = settings_of(model, "the tokenizer")
    except ModelError:
        return None
    text = settings.get("text_config")  # of models with images
    size = (text.get("vocab_size") if isinstance(text, dict) else None) or settings.get("vocab_size")
    return size if isinstance(size, int) else None


def check_ids(path: str, trust_remote_code: bool = False) -> None:
    """Raises ModelError if two tokens have the same id in ``tokenizer.json``. The library that reads it drops one of
    them, and encodes its text as an unknown token."""
    file = Path(tokenizer_folder(path, code=trust_remote_code)) / "tokenizer.json"
    if not file.is_file():
        return
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    pairs = [*vocabulary.items()] if isinstance(vocabulary, dict) else [(t[0], i) for i, t in enumerate(vocabulary)]
    names: dict[int, str] = {}
    for token, number in [*pairs, *((added["content"], added["id"]) for added in content.get("added_tokens", []))]:
        if names.setdefault(number, token) != token:
            raise ModelError(
                f"{file} has two tokens with the id {number}, {names[number]!r} and {token!r}. Each token needs its "
                "own id: correct the file, or use the published one."
            )


def tokens_of(tokenizer: Any) -> Tokens:
    """The tokenizer's functions for plugins."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    return Tokens(encode, decoder_of(tokenizer))


def decoder_of(tokenizer: Any, special_tokens: bool = True) -> Callable[[Sequence[int]], str]:
    """``decode(ids)`` of a tokenizer, with or without special tokens, and spaces not cleaned up."""

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    return decode


def check_stops(stops: Sequence[str], tokenizer: Any) -> None:
    """Refuse stop strings with special tokens, because :class:`TokenDecoder` leaves them out of the text of an answer.

    Raises ConfigError.
    """
    for stop in stops:
        for token in special_tokens_in(stop, tokenizer):
            raise ConfigError(
                f"sampling.stop: {stop!r} contains the special token {token!r}. The text of an answer has no special "
                "tokens, so this would never stop an answer. Answers already end at the end tokens of tokenizer, chat "
                "template and generation_config.json; add the token to eos_token_id there, or remove it here."
            )


def with_stop_tokens(sampling: Sampling, tokenizer: Any) -> Sampling:
    """``sampling`` with the ids of its stop strings that are special tokens. The text of an answer has no special
    tokens (:class:`TokenDecoder`), so as strings they would never stop it."""
    special = special_tokens(tokenizer)
    ids = [special[stop] for stop in sampling.stop if stop in special]
    stops = tuple(stop for stop in sampling.stop if stop not in special)
    return replace(sampling, stop=stops, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *ids))))


def special_tokens_in(text: str, tokenizer: Any) -> list[str]:
    """The special tokens in a text. The text of an answer has none of them (:class:`TokenDecoder`)."""
    return sorted(token for token in special_tokens(tokenizer) if token in text)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """{special token: id}. ``all_special_tokens`` has only the tokens that tokenizer_config.json names, so ``<|end|>``
    of Phi-3 and ``<|call|>`` of gpt-oss are missing there."""
    names = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return {**names, **{token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}}


def has_tokenizer(folder: str) -> bool:
    """Whether there is a tokenizer in the model's folder. A path that is not a folder is assumed to have one."""
    place = Path(folder).expanduser()
    return not place.is_dir() or any((place / name).exists() for name in _FILES)


@dataclass
class TokenDecoder:
    """``decode(ids) -> text`` without special tokens. It is pickled as the tokenizer's path, so it works in other
    processes."""

    path: str
    trust_remote_code: bool = False
    tokenizer: Any = None
    """The tokenizer at the path, if this process has loaded it."""

    def __call__(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.path, self.trust_remote_code)
        return decoder_of(self.tokenizer, special_tokens=False)(ids)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tokenizer": None}


def check_vocabularies(policy: ModelSpec, tokenizer: Any, specs: Iterable[ModelSpec]) -> None:
    """Refuse a role whose model has another tokenizer than the policy, or an embedding that is too small for it.

    Ids that both tokenizers know must be the same token. A model without a tokenizer in its folder is assumed to have
    the policy's tokenizer. The size of its embedding is always compared.

    Args:
        tokenizer: tokenizer of the policy.

    Raises ModelError naming the role and the first token that differs.
    """
    policy_ids: dict[str, int] = tokenizer.get_vocab()
    own_rows = embedding_rows(tokenizer)
    # Ids beyond the policy's own embedding never reach a role, because rows with such tokens are refused.
    largest = max(i for i in policy_ids.values() if own_rows is None or i < own_rows)
    paths = {policy.path}
    for spec in specs:
        if spec.path in paths:
            continue
        paths.add(spec.path)
        role = f"role {spec.role.name!r} ({spec.path})"
        remedy = "Every role reads the policy's tokens, so its model must have been trained on the same ones."
        rows = vocabulary_size(spec.path)
        if rows is not None and largest >= rows:
            raise ModelError(
                f"{role} has a vocabulary of {rows} tokens; the policy's tokenizer ({policy.path}) has ids up to "
                f"{largest}. {remedy}"
            )
        role_ids = _vocabulary(spec)
        if role_ids is None:
            continue
        name_of = {i: token for token, i in role_ids.items()}
        other = sorted((i, token) for token, i in policy_ids.items() if name_of.get(i, token) != token)
        if other:
            i, token = other[0]
            raise ModelError(
                f"the tokenizer of {role} differs from the policy's ({policy.path}): {len(other)} of {len(policy_ids)} "
                f"ids are other tokens, e.g. id {i} is {token!r} for the policy and {name_of[i]!r} for the role. "
                f"{remedy}"
            )


def _vocabulary(spec: ModelSpec) -> dict[str, int] | None:
    """None if there is no tokenizer in the model's folder. Raises ModelError if the tokenizer cannot be loaded."""
    place = tokenizer_folder(spec.path, code=spec.trust_remote_code)
    if not has_tokenizer(place):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"the tokenizer of role {spec.role.name!r} ({spec.path}) cannot be loaded, so it cannot be compared "
            f"with the policy's tokenizer: {type(error).__name__}: {error}. Fix it, or copy the policy's files there."
        ) from error
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
