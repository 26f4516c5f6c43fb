"""Built-in heads: log-probs, entropy, values and scores are functions of logits like any plugin's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlhf.types import Head


def _logprobs(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return logits_CV.gather(1, ids_C[:, None])[:, 0] - torch.logsumexp(logits_CV, 1)


def _entropy(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    logp_CV = torch.log_softmax(logits_CV, 1)
    return -(logp_CV.exp() * logp_CV).sum(1)


def _scalar(outputs_C1: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return outputs_C1[:, 0]


LOGPROBS = Head("logprobs", _logprobs)
ENTROPY = Head("entropy", _entropy)
VALUES = Head("values", _scalar)
SCORES = Head("scores", _scalar, over="last_token", at="at")
"""Per sequence [B]: read off after the last token; the trainer supplies the mask ``last_token``."""

BUILTIN: dict[str, Head] = {h.name: h for h in (LOGPROBS, ENTROPY, VALUES, SCORES)}
LANGUAGE_MODEL_ONLY = frozenset({"logprobs", "entropy"})


def resolve_head(output: str | Head, over: str | None = None) -> Head:
    """A name or Head as a Head; ``over`` replaces the mask of a built-in token head."""
    if isinstance(output, Head):
        return output
    if output not in BUILTIN:
        raise KeyError(f"no model output {output!r}; built in are {sorted(BUILTIN)}; others are given as a Head")
    head = BUILTIN[output]
    if over is None or head.over == "last_token":
        return head
    return Head(head.name, head.fn, over, head.at, head.columns, head.constants)
