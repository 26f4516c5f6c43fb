"""Built-in heads: log-probs, entropy, top-1 accuracy, values, scores and hidden states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rlhf.types import Head


def _logprobs(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    # half the memory traffic of logits[id] - logsumexp(logits), with the same rounding
    return -F.cross_entropy(logits_CV, ids_C, reduction="none")


def _entropy(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    logp_CV = torch.log_softmax(logits_CV, 1)
    return -(logp_CV.exp() * logp_CV).sum(1)


def _top1(logits_CV: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    # on a CPU, max takes a quarter of the time of argmax
    logits_CV = logits_CV.detach()
    return (logits_CV.gather(1, ids_C[:, None])[:, 0] == logits_CV.amax(1)).float()


def _scalar(outputs_C1: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return outputs_C1[:, 0]


def _hidden(hidden_CH: Tensor, ids_C: Tensor, columns: Any, constants: Any) -> Tensor:
    return hidden_CH


LOGPROBS = Head("logprobs", _logprobs)
ENTROPY = Head("entropy", _entropy)
TOP1 = Head("top1", _top1)
"""1.0 if no token of the vocabulary is more probable than the token itself, else 0.0. It has no gradient."""
VALUES = Head("values", _scalar)
SCORES = Head("scores", _scalar, over="last_token", position="at")
"""Per sequence [B]: the output after the last token. The trainer supplies the mask ``last_token``."""
HIDDEN = Head("hidden", _hidden, reads="hidden")
"""[A, H]: the input of the output head at the position that predicts the token. :class:`OutputHead` maps it to
logits."""

BUILTIN: dict[str, Head] = {h.name: h for h in (LOGPROBS, ENTROPY, TOP1, VALUES, SCORES, HIDDEN)}
LANGUAGE_MODEL_ONLY = frozenset({"logprobs", "entropy", "top1"})
ANY_MODEL = frozenset({"hidden"})


@dataclass(frozen=True, slots=True)
class OutputHead:
    """A copy of a language model's whole output head, without gradient. V vocabulary, H hidden size.

    Another role uses it on its own device (:class:`rlhf.types.Lent`), so that the logits of a model on other devices
    are computed chunk by chunk.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    softcap: float | None = None
    """See :func:`shape_logits`."""
    scale: float = 1.0
    """See :func:`shape_logits`."""

    @property
    def vocabulary(self) -> int:
        """Number of rows of the weight."""
        return int(self.weight_VH.shape[0])

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """fp32 [C, V]; the product is computed in the precision of the weight."""
        logits_CV = F.linear(hidden_CH.to(self.weight_VH.dtype), self.weight_VH, self.bias_V).float()
        return shape_logits(logits_CV, self.scale, self.softcap)

    def to(self, device: torch.device, dtype: torch.dtype) -> OutputHead:
        """The head on ``device`` in ``dtype``: the same object if nothing changes, otherwise a copy."""
        bias_V = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return replace(self, weight_VH=self.weight_VH.to(device, dtype), bias_V=bias_V)

    def first(self, rows: int) -> OutputHead:
        """A head with the first ``rows`` rows, which shares memory with this one."""
        return replace(
            self,
            weight_VH=self.weight_VH[:rows],
            bias_V=None if self.bias_V is None else self.bias_V[:rows],
        )


def shape_logits(logits_CV: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Apply a model's scaling of logits: multiply by ``scale``, and if ``softcap`` is set, compute
    ``softcap * tanh(logits / softcap)``."""
    if scale != 1.0:
        logits_CV = logits_CV * scale
    return logits_CV if softcap is None else softcap * torch.tanh(logits_CV / softcap)


def resolve_head(output: str | Head, over: str | None = None) -> Head:
    """The head for a name or Head. ``over`` replaces the mask of a built-in token head."""
    if isinstance(output, Head):
        return output
    if output not in BUILTIN:
        message = (
            f"unknown model output {output!r}; built-in outputs are {sorted(BUILTIN)}; any other output must be a Head"
        )
        if len(output) == 1:
            message += '. A string in place of a tuple is read letter by letter: write ("logprobs",)'
        raise KeyError(message)
    head = BUILTIN[output]
    if over is None or head.over == "last_token":
        return head
    return replace(head, over=over)


def gives(kind: str, output: str) -> bool:
    """Whether a model with head ``kind`` (:attr:`rlhf.types.RoleSpec.head`) has the built-in ``output``."""
    return output in ANY_MODEL or (output in LANGUAGE_MODEL_ONLY) == (kind == "lm")
