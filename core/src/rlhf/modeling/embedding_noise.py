"""Noise on the embeddings while a model is trained (NEFTune)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.ops.batch import Batch


class EmbeddingNoise:
    """Uniform noise from -1 to 1, times alpha / sqrt(L d), is added to every embedding: L tokens of its sequence, d its
    size (Jain et al. 2023, arXiv:2310.05914, algorithm 1). Only inside :meth:`over`, so neither log-probs that are
    stored nor evaluations, samples and exports have it.

    Deviations: (1) L is the sequence's own length; transformers' form takes that of the padded batch. (2) Where
    embeddings are scaled behind their table (Gemma), the noise is added before.
    """

    def __init__(self, module: PreTrainedModel, alpha: float) -> None:
        self.alpha = alpha
        self._length_N: Tensor | None = None
        module.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def over(self, batch: Batch) -> Iterator[None]:
        """The embeddings computed inside are those of the N tokens of ``batch``, drawn from torch's generator."""
        self._length_N = batch.lens_B[batch.seq_N]
        try:
            yield
        finally:
            self._length_N = None

    def _add(self, module: torch.nn.Module, arguments: Any, embedded_1NH: Tensor) -> Tensor | None:
        if self._length_N is None:
            return None
        scale_N = self.alpha / (self._length_N * embedded_1NH.shape[-1]).sqrt()
        noise_1NH = torch.empty_like(embedded_1NH).uniform_(-1, 1)
        return embedded_1NH + noise_1NH * scale_N[:, None].to(embedded_1NH.dtype)
