"""Noise on the embeddings while a model is trained (NEFTune)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf_modeling.loaded import LoadedModel


class EmbeddingNoise:
    """Adds uniform noise from -1 to 1, times alpha / sqrt(L d), to every embedding. L is the number of tokens of its
    sequence, d the size of the embedding (Jain et al. 2023, arXiv:2310.05914, algorithm 1). The noise is added only
    inside :meth:`added`; stored log-probs, evaluations, samples and exports do not have it.

    Deviations: (1) L is the length of the sequence; transformers uses the length of the padded batch. (2) If embeddings
    are scaled after the lookup (Gemma), the noise is added before the scaling.
    """

    def __init__(self, model: LoadedModel, alpha: float) -> None:
        self.alpha, self.loaded_model = alpha, model
        self._on = False
        embedding: Any = model.module.get_input_embeddings()
        embedding.register_forward_hook(self._add)

    @contextmanager
    def added(self) -> Iterator[None]:
        """Context in which computed embeddings get noise, drawn from torch's generator."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _add(self, module: torch.nn.Module, arguments: Any, embedded_RTH: Tensor) -> Tensor | None:
        """R rows of T tokens: one row of packed sequences or this rank's part of it, or sequences of equal length."""
        if not self._on:
            return None
        lens_B = torch.tensor(list(self.loaded_model.computing), device=embedded_RTH.device)
        length_N = torch.repeat_interleave(lens_B, lens_B)
        if self.loaded_model.part is not None:
            length_N = self.loaded_model.part.local_rows(length_N)
        length_RT1 = length_N.view(*embedded_RTH.shape[:2], 1)
        scale_RT1 = self.alpha / (length_RT1 * embedded_RTH.shape[-1]).sqrt()
        noise_RTH = torch.empty_like(embedded_RTH).uniform_(-1, 1)
        return embedded_RTH + noise_RTH * scale_RT1.to(embedded_RTH.dtype)
