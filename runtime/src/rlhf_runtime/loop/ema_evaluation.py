"""Evaluate the weights that a run exports. If the trainer keeps a moving average, the policy uses the average during
the evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from rlhf.errors import CapabilityError, RlhfError
from rlhf.interfaces import Trainer

from rlhf_runtime.loop.learn import Metrics
from rlhf_runtime.models.roles import Role
from rlhf_runtime.samples.sampling import Sampler
from rlhf_runtime.samples.stream import Stream

EXPORTED = "ema"
"""The view that is exported if the policy has it."""


def evaluates_average(policy: Role, trainer: type[Trainer], weights: Literal["exported", "live"]) -> bool:
    """Whether evaluations need :func:`with_average`.

    Args:
        trainer: the policy's.
        weights: ``eval.weights``.

    Raises CapabilityError if the trainer cannot compute with its average.
    """
    if weights == "live" or EXPORTED not in policy.facts.views:
        return False
    if trainer.use_view is Trainer.use_view:
        raise CapabilityError(
            f"trainer {trainer.name!r} keeps an average that it cannot be evaluated with. Set --eval.weights live, and "
            "the best step is that of the live weights, or leave the average out."
        )
    return True


def with_average(
    evaluate: Callable[[], Metrics], policy: Role, sampler: Sampler | None, stream: Stream | None, total_steps: int
) -> Metrics:
    """Call ``evaluate`` with the policy's average in place of its weights, also in the generator.

    A generator with its own copy gets the average before the evaluation and the live weights after it, each with its
    proof. It gets the live weights only if training samples will be drawn with them. After a failure the policy has its
    live weights again, so that they can be saved.

    No token of a training sample is drawn with the average: unfinished answers of a continuous stream are completed
    first, and further ones wait until the generator has its live weights again.

    Args:
        stream: the stream of an online run.
    """
    try:
        if stream is not None:
            stream.hold()
        _use_view(EXPORTED, policy, sampler, sync=True)
        metrics = evaluate()
    except BaseException:
        with suppress(RlhfError):  # if the policy's workers are gone, only the first error is shown
            _use_view("live", policy, sampler, sync=False)
        raise
    _use_view("live", policy, sampler, sync=_samples_again(sampler, stream, total_steps))
    if stream is not None:
        stream.release()
    return metrics


def _use_view(view: str, policy: Role, sampler: Sampler | None, sync: bool) -> None:
    if sampler is not None:
        sampler.phases.begin_learning()  # offloaded weights cannot be exchanged
    policy.every("use_view", view)
    if sampler is not None and sync:
        sampler.phases.begin_sync()
        sampler.weights.push(sampler.weights.version)


def _samples_again(sampler: Sampler | None, stream: Stream | None, total_steps: int) -> bool:
    """Whether training samples will be drawn with the weights that the generator had before."""
    if sampler is None or stream is None:
        return False
    version = sampler.weights.version
    return version < total_steps and stream.samples_with(version)
