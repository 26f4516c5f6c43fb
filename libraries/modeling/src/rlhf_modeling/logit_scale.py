"""The factor that a language model multiplies its logits by, found by comparison with the model's own logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_modeling.loaded import LoadedModel


def find_logit_scale(loaded: LoadedModel, ids_T: Tensor, hidden_TH: Tensor) -> bool:
    """Set ``loaded.logit_scale``. Returns False where no factor turns the head's logits into the model's, or the head
    reads something else than the hidden states.

    Args:
        hidden_TH: the body's hidden states of ``ids_T``.
    """
    if loaded.head.in_features != hidden_TH.shape[-1]:
        return False
    want_TV = loaded.module(input_ids=ids_T[None], use_cache=False).logits[0].float()
    loaded.logit_scale = 1.0
    if not _same(loaded.logits(hidden_TH), want_TV):
        loaded.logit_scale = _nearest_of_config(loaded, hidden_TH, want_TV)
    return _same(loaded.logits(hidden_TH), want_TV)


def _nearest_of_config(loaded: LoadedModel, hidden_TH: Tensor, want_TV: Tensor) -> float:
    """The number in the config, or the inverse of one, that is nearest to the measured factor."""
    plain_TV, cap = loaded.head(hidden_TH).float(), loaded.softcap
    if cap is not None:
        want_TV = cap * torch.atanh((want_TV / cap).clamp(-0.999999, 0.999999))
    fitted = float((plain_TV * want_TV).sum() / (plain_TV * plain_TV).sum())
    config = loaded.module.config.get_text_config().to_dict()
    named = [float(v) for v in config.values() if isinstance(v, int | float) and v]
    return min((scale for v in named for scale in (v, 1 / v)), key=lambda scale: abs(scale - fitted), default=1.0)


def _same(got_TV: Tensor, want_TV: Tensor) -> bool:
    return got_TV.shape == want_TV.shape and torch.allclose(got_TV.float(), want_TV, rtol=1e-4, atol=1e-4)
