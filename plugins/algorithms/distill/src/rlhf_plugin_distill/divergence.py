"""Divergences between two distributions over the vocabulary, and the head that computes them chunk by chunk.

With the teacher's distribution p, the student's q and m = beta p + (1 - beta) q (arXiv:2306.13649, sections 2 and 3):

====================  ==========================================
forward_kl            KL(p || q)
reverse_kl            KL(q || p)
jsd                   beta KL(p || m) + (1 - beta) KL(q || m)
====================  ==========================================

jsd is at most ln 2; divided by beta it becomes the forward KL as beta goes to 0, divided by 1 - beta the reverse KL as
beta goes to 1.

With ``top_k``, p and q are distributions over K + 1 outcomes: the teacher's K most probable tokens, and any other
token. No divergence is then larger than over the vocabulary.

The teacher's distribution is sent either as its hidden states and its output head, which the student's trainer
multiplies, or as its K most probable tokens. The output head is copied once, so a teacher whose weights change in the
run sends the tokens.

Shape suffixes: C tokens of a chunk, V vocabulary, K most probable tokens, H hidden size of the teacher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from rlhf.ops.batch import Batch
from rlhf.types import Head
from torch import Tensor

Divergence = Literal["forward_kl", "reverse_kl", "jsd"]

TEACHER = "teacher"
HIDDEN = "teacher_hidden"
"""Token column: the teacher's hidden states."""
TOP, TOP_IDS, TOP_LOGPROBS = "teacher_top", "teacher_top_ids", "teacher_top_logprobs"
"""Token columns: the teacher's most probable tokens. The ids are int32 [N, K]. The log-probs, with that of any other
token, are float32 [N, K + 1]. The column with the first name holds both, concatenated (:func:`top_head`)."""


def kl(logp_CV: Tensor, logq_CV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v), in nats, [C]."""
    return (logp_CV.exp() * (logp_CV - logq_CV)).sum(1)


def with_rest(logp_CV: Tensor, index_CK: Tensor) -> Tensor:
    """Log-probs of these tokens, and of any other one, [C, K + 1]. From the other tokens' own log-probs: 1 minus the
    sum would lose a small rest to rounding."""
    rest_C = logp_CV.scatter(1, index_CK, -math.inf).logsumexp(1)
    return torch.cat([logp_CV.gather(1, index_CK), rest_C[:, None]], 1)


def divergence(
    teacher_CV: Tensor, student_CV: Tensor, kind: Divergence, beta: float, temperature: float, top_k: int | None = None
) -> Tensor:
    """The divergence of the two distributions at ``temperature``, in nats, [C].

    Args:
        teacher_CV, student_CV: logits.
        beta: in (0, 1), the teacher's share of m; read for ``jsd`` only.
        temperature: > 0, divides the logits of both.
        top_k: None, or the size of the vocabulary: every token is an outcome by itself.
    """
    logp_CV = torch.log_softmax(teacher_CV / temperature, 1)
    logq_CV = torch.log_softmax(student_CV / temperature, 1)
    if top_k is not None and top_k < logp_CV.shape[1]:
        index_CK = logp_CV.topk(top_k, 1).indices
        logp_CV, logq_CV = with_rest(logp_CV, index_CK), with_rest(logq_CV, index_CK)
    return between(logp_CV, logq_CV, kind, beta)


def between(logp_CV: Tensor, logq_CV: Tensor, kind: Divergence, beta: float) -> Tensor:
    """The divergence of the teacher's distribution p and the student's q, in nats, [C]."""
    if kind == "forward_kl":
        return kl(logp_CV, logq_CV)
    if kind == "reverse_kl":
        return kl(logq_CV, logp_CV)
    # log m from the logs of p and q: the sum of the probabilities would be 0 where both underflow.
    logm_CV = torch.logaddexp(logp_CV + math.log(beta), logq_CV + math.log1p(-beta))
    return beta * kl(logp_CV, logm_CV) + (1 - beta) * kl(logq_CV, logm_CV)


def divergence_head(
    kind: Divergence, beta: float, temperature: float, top_k: int | None = None, by_ids: bool = False
) -> Head:
    """[A, 2]: the divergence at the position that predicts each token, and 1 if both models have the same argmax.

    With ``by_ids`` it reads the teacher's most probable tokens (columns ``teacher_top_ids``, ``teacher_top_logprobs``),
    else the teacher's hidden states (column ``teacher_hidden``) and multiplies them by the output head that the teacher
    lends, so the teacher's logits, like the student's, exist for one chunk of tokens at a time. If the vocabularies are
    padded to different sizes, both distributions are restricted to the tokens that both models have.
    """
    if by_ids:
        constants: dict[str, Any] = {"kind": kind, "beta": beta, "temperature": temperature}
        return Head("divergence", _compared_by_ids, columns=(TOP_IDS, TOP_LOGPROBS), constants=constants)
    constants = {"kind": kind, "beta": beta, "temperature": temperature, "top_k": top_k}
    return Head("divergence", _compared, columns=(HIDDEN,), constants=constants, lenders=(TEACHER,))


def _compared(student_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Mapping[str, Any]) -> Tensor:
    head = constants[TEACHER]
    teacher_CV = head.logits(columns[HIDDEN])
    student_CV = student_CV[:, : head.vocabulary]
    options = (constants[name] for name in ("kind", "beta", "temperature", "top_k"))
    d_C = divergence(teacher_CV, student_CV, *options)
    agree_C = (teacher_CV.argmax(1) == student_CV.detach().argmax(1)).to(d_C.dtype)
    return torch.stack([d_C, agree_C], 1)


def _compared_by_ids(
    student_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Mapping[str, Any]
) -> Tensor:
    index_CK = columns[TOP_IDS].long()
    logq_CV = torch.log_softmax(student_CV / constants["temperature"], 1)
    d_C = between(columns[TOP_LOGPROBS], with_rest(logq_CV, index_CK), constants["kind"], constants["beta"])
    agree_C = (index_CK[:, 0] == student_CV.detach().argmax(1)).to(d_C.dtype)
    return torch.stack([d_C, agree_C], 1)


def top_head(top_k: int, temperature: float) -> Head:
    """[A, 2 K + 1], at the position that predicts each token: the ids of the K most probable tokens, most probable
    first, their log-probs, and the log-prob of any other token. K is ``top_k``, or all tokens except one."""
    return Head(TOP, _top, constants={"top_k": top_k, "temperature": temperature})


def _top(logits_CV: Tensor, ids_C: Tensor, columns: Mapping[str, Tensor], constants: Mapping[str, Any]) -> Tensor:
    logp_CV = torch.log_softmax(logits_CV / constants["temperature"], 1)
    index_CK = logp_CV.topk(min(constants["top_k"], logp_CV.shape[1] - 1), 1).indices
    return torch.cat([index_CK.to(logp_CV.dtype), with_rest(logp_CV, index_CK)], 1)  # fp32 has ids below 2^24 exactly


def split_top(batch: Batch) -> Batch:
    """``batch`` with ``teacher_top`` replaced by the columns that the student reads."""
    top_N = batch.tok[TOP]
    k = top_N.shape[1] // 2
    batch = batch.with_column("tok", TOP_IDS, top_N[:, :k].int()).with_column("tok", TOP_LOGPROBS, top_N[:, k:])
    return replace(batch, tok={name: values for name, values in batch.tok.items() if name != TOP})
