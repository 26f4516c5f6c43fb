"""An evaluation of the weights that a run would export: where an average is kept, the policy wears it meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from rlhf.errors import CapabilityError, RlhfError
from rlhf.interfaces import Trainer

from rlhf_runtime.loop.learn import Metrics

if TYPE_CHECKING:
    from rlhf_runtime.loop.run import Run

EXPORTED = "ema"
"""The view that is exported where the policy has it."""


def exported_view(run: Run) -> str:
    """What ``model/`` is made of."""
    return EXPORTED if EXPORTED in run.roles["policy"].facts.views else "live"


def check_wearing(run: Run, trainer: type[Trainer], asked: Literal["exported", "live"]) -> bool:
    """Whether the policy has to wear something else than its live weights to be evaluated.

    Args:
        trainer: the policy's.

    Raises CapabilityError where it cannot.
    """
    if asked == "live" or exported_view(run) == "live":
        return False
    if trainer.use_view is Trainer.use_view:
        raise CapabilityError(
            f"trainer {trainer.name!r} keeps an average that it cannot be evaluated with. Set --eval.weights live, and "
            "the best step is that of the live weights, or leave the average out."
        )
    return True


def worn(run: Run, evaluate: Callable[[], Metrics]) -> Metrics:
    """``evaluate`` with the policy's average in place of its weights, in the generator too.

    Where the generator holds a copy, the average is sent before and the live weights after, each with its proof; the
    latter only where somebody will sample with them. After a failure the policy is as it was, so that what was learnt
    can be saved.
    """
    try:
        _wear(run, EXPORTED, sync=True)
        metrics = evaluate()
    except BaseException:
        with suppress(RlhfError):  # where the policy is gone, the first cause is the one to see
            _wear(run, "live", sync=False)
        raise
    _wear(run, "live", sync=_samples_again(run))
    return metrics


def _wear(run: Run, view: str, sync: bool) -> None:
    run.take_devices_back()  # weights that were put aside cannot be exchanged
    run.roles["policy"].every("use_view", view)
    if run.weights is not None and sync:
        if run.phases is not None:
            run.phases.begin_sync()
        run.weights.push(run.weights.version)


def _samples_again(run: Run) -> bool:
    """Whether training samples will be drawn with the weights that the generator had before."""
    if run.weights is None or run.stream is None:
        return False
    version = run.weights.version
    return version < run.total_steps and run.stream.samples_with(version)
