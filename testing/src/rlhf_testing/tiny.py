"""Makes tiny models and a character tokenizer, which tests and examples use instead of a model hub."""

from __future__ import annotations

import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

CHARS = string.ascii_letters + string.digits + string.punctuation + " \n"
"""96 printable characters: the tokenizer's default alphabet."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""A message becomes the token of its role, its text and the end token."""


def tiny_tokenizer(path: str | Path, chars: Iterable[str] = CHARS, chat_template: str | None = None) -> Path:
    """Save a character-level fast tokenizer; loads with ``AutoTokenizer``.

    It has one token per character, without prefix space, normalisation or added tokens. So ``decode(encode(text)) ==
    text`` for every text over ``chars``, and the ids of a concatenation are the concatenation of the ids. A character
    outside ``chars`` becomes ``<unk>``.

    Args:
        path: folder, created where absent.
        chars: the alphabet, in id order after the special tokens ``<pad>`` 0, ``<eos>`` 1, ``<unk>`` 2.
        chat_template: None, a Jinja template, or ``"default"`` for :data:`CHAT_TEMPLATE`, whose role markers then
            are single tokens.

    Returns: ``path``.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, EOS, UNK, *(ROLES if chat_template == "default" else ())]
    alphabet = list(dict.fromkeys(chars))
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=EOS, pad_token=PAD, unk_token=UNK, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE if chat_template == "default" else chat_template
    tokenizer.save_pretrained(str(path))
    return Path(path)


def tiny_model(
    path: str | Path,
    *,
    architecture: str = "qwen3",
    hidden: int = 32,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int | None = None,
    tied: bool = True,
    std: float = 0.1,
    seed: int = 0,
    head: Literal["lm", "scalar"] = "lm",
    chars: Iterable[str] = CHARS,
    chat_template: str | None = None,
    **config: Any,
) -> Path:
    """Save a randomly initialised model with its tokenizer in Hugging Face format (safetensors, fp32).

    Args:
        path: folder, created where absent. A tokenizer that is already there is kept, and ``chars`` and
            ``chat_template`` are not read.
        architecture: a ``model_type`` of transformers with a causal language model: ``qwen3``, ``llama``, ``mistral``,
            ``gemma2``, ``gemma3_text``, ...
        head_dim: None: ``hidden // heads``.
        intermediate: width of the feed-forward layer; None: ``2 * hidden``.
        tied: whether the language-model head is the embedding.
        std: standard deviation of the initial weights. The default is large, so that the outputs depend visibly on the
            inputs; 0.02 is usual for training.
        seed: equal seeds give equal weights. The caller's random state is not changed.
        head: ``lm`` for ``AutoModelForCausalLM``, ``scalar`` for ``AutoModelForSequenceClassification`` with one
            label.
        config: further fields of the architecture's config (``sliding_window=8``, ``attention_dropout=0.1``).

    Returns: ``path``.

    Raises: ValueError for an architecture (``qwen2``) for which transformers loads its own tokenizer class.
    """
    import torch
    from rlhf_modeling.pretrained import exporting
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    path = Path(path)
    if not (path / "tokenizer.json").exists():
        tiny_tokenizer(path, chars, chat_template)
    tokenizer = AutoTokenizer.from_pretrained(str(path))
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "max_position_embeddings": 4096,
        "initializer_range": std,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if head == "scalar":
        fields["num_labels"] = 1
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(AutoConfig.for_model(architecture, **{**fields, **config}), dtype=torch.float32)
    with exporting(model):
        model.save_pretrained(str(path))
    if type(AutoTokenizer.from_pretrained(str(path))) is not type(tokenizer):  # the model's config decides it
        raise ValueError(
            f"transformers loads its own tokenizer class for a model of architecture {architecture!r}, so a "
            "character tokenizer cannot be used: use 'qwen3' or 'llama'"
        )
    return path


def tiny_reward_model(path: str | Path, **options: Any) -> Path:
    """:func:`tiny_model` with a scalar head: ``AutoModelForSequenceClassification`` with ``num_labels = 1``."""
    return tiny_model(path, head="scalar", **options)
