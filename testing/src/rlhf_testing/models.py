"""Tiny models on disk for the suites of trainers and generators. Each process creates them once and deletes them when
it ends."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from rlhf_testing.tiny import tiny_model


@functools.cache
def model_path(architecture: str = "qwen3", head: str = "lm", seed: int = 0, **sizes: float) -> Path:
    """A folder in Hugging Face format with a tokenizer of one token per character. Do not write into it.

    ``sizes``: arguments of :func:`~rlhf_testing.tiny.tiny_model` that replace its defaults (``head_dim=32``,
    ``tied=False``).
    """
    folder = Path(tempfile.mkdtemp(prefix="rlhf-testing-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = {"architecture": architecture, "head": head, "seed": seed, "hidden": 32, "layers": 2, "std": 0.2} | sizes
    return tiny_model(folder / "model", **options)  # type: ignore[arg-type]
