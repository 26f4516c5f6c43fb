"""Cross entropy on observations, beside the loss of the policy (ECHO)."""

from __future__ import annotations

from dataclasses import replace

from rlhf.interfaces.loss import Loss
from rlhf.ops.heads import LOGPROBS
from rlhf.ops.losses import LossInput
from rlhf.ops.trajectories import OBSERVATIONS
from rlhf.types import Head, LossOutput, Reduce

from rlhf_algorithms.kl import Beside

OBSERVATION_LOGPROBS = replace(LOGPROBS, name="observation_logprobs", over=OBSERVATIONS)
"""Log-probs at temperature 1, because these tokens were not sampled."""


class WithEcho(Beside):
    """``inner`` + ``coef`` times the cross entropy of the observation tokens of the policy's own episodes (Shrivastava
    et al. 2026, ECHO, arXiv:2605.24517)::

        coef / S * sum over samples s with observations of 1 / T_s * sum over observation tokens t of s of -log pi(t)

    S is the number of samples with an observation, T_s the number of observation tokens of one. Other tokens are not
    part of this term, and observation tokens are part of no other. The term shares the forward pass of ``inner``; the
    output head reads more tokens. ``observation_nll`` is the mean over observation tokens, without the coefficient.

    Deviations: (1) The paper leaves out the text that a harness writes around an observation. Here an observation is
    the whole turn, with the markers that the chat template writes. (2) An observation after the last answer is not in
    the sequence, and an observation in a rewritten context (``Turn.fresh``) is not distinguished from the rest of the
    context.
    """

    def __init__(self, inner: Loss, coef: float) -> None:
        super().__init__(inner)
        self.coef = coef

    def outputs(self) -> tuple[str | Head, ...]:
        return (*self.inner.outputs(), OBSERVATION_LOGPROBS)

    def columns(self) -> tuple[str, ...]:
        return (*self.inner.columns(), OBSERVATIONS)

    def signal(self) -> tuple[str, ...]:
        """Observations are a signal, even where all advantages are 0."""
        names = self.inner.signal()
        return (*names, OBSERVATIONS) if names else ()

    def reduce(self) -> dict[str, Reduce]:
        return {**self.inner.reduce(), "echo": Reduce("seq_mean_token_mean", over=OBSERVATIONS, coef=self.coef)}

    def __call__(self, x: LossInput) -> LossOutput:
        result = self.inner(x)
        nll = -x[OBSERVATION_LOGPROBS.name]
        metrics = {**result.metrics, "observation_nll": (OBSERVATIONS, nll)}
        return LossOutput({**result.terms, "echo": nll}, metrics)
