"""Make the 0.5B-class model with random weights, so that no machine needs a model hub."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

from rlhf_testing.tiny import CHARS, tiny_model

LARGE: dict[str, Any] = {
    "hidden": 896,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 4864,
}
"""Qwen2.5-0.5B's sizes in the Qwen3 architecture (norms on queries and keys in place of biases), for which transformers
loads a tokenizer made here; 494 M parameters with the vocabulary below, head and embedding tied."""
VOCABULARY = 151936
TINY: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 128}
TINY_VOCABULARY = 512

MIDDLE: dict[str, Any] = {**LARGE, "layers": 8}
MIDDLE_VOCABULARY = 8192
"""126 M parameters: for parts that write an optimizer's state to disk."""
QWEN3_06B: dict[str, Any] = {
    "hidden": 1024,
    "layers": 28,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "intermediate": 3072,
    "max_position_embeddings": 40960,
}
"""Qwen3-0.6B, 596 M parameters with the large vocabulary, head and embedding tied."""


def sizes(small: bool) -> tuple[dict[str, Any], int]:
    """(sizes, tokens of the vocabulary)."""
    return (TINY, TINY_VOCABULARY) if small else (LARGE, VOCABULARY)


def alphabet(chars: str, tokens: int) -> list[str]:
    """The vocabulary of a tokenizer with so many tokens, without its three special ones: ``chars``, and numbers after a
    space. Texts are encoded with the characters only, but any token can be sampled and decodes to text."""
    return [*chars, *(f" {n}" for n in range(tokens - 3 - len(chars)))]


def make(folder: Path, small: bool) -> Path:
    """Make the model in Hugging Face format in ``folder``, if it does not exist. Returns its path."""
    return _make(folder / "model", *sizes(small))


def make_middle(folder: Path, small: bool) -> Path:
    return _make(folder / "middle", *((TINY, TINY_VOCABULARY) if small else (MIDDLE, MIDDLE_VOCABULARY)))


def make_06b(folder: Path, small: bool) -> Path:
    return _make(folder / "06b", TINY if small else QWEN3_06B, vocabulary(small))


def vocabulary(small: bool) -> int:
    """Tokens of the large models, and of the tiny one."""
    return TINY_VOCABULARY if small else VOCABULARY


def parameters(model: Path) -> int:
    """Number of parameters in the model's file; a tied head counts once."""
    from safetensors import safe_open

    with safe_open(str(model / "model.safetensors"), "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118, not a dict


def _make(path: Path, shape: dict[str, Any], tokens: int) -> Path:
    if not path.exists():
        draft = path.with_name(path.name + ".draft")
        shutil.rmtree(draft, ignore_errors=True)  # of a section that was ended while it wrote
        tiny_model(draft, std=0.02, chars=alphabet(CHARS, tokens), seed=0, **shape)
        draft.rename(path)
    return path
