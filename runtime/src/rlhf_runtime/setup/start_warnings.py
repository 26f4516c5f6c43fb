"""What a run says at its start of a combination that is allowed and seldom meant."""

from __future__ import annotations

from rlhf.interfaces import Advantage, Algorithm, Loss

from rlhf_runtime.config.online_validation import CORRECTION
from rlhf_runtime.config.runfile import RunFile


def stream_notes(config: RunFile, algorithm: Algorithm) -> list[str]:
    """Samples of an older policy whose credit is taken for the policy's own.

    Only where there is credit: what learns from given answers and their order alone may learn from anybody's.
    """
    stream, estimates = config.stream, any(isinstance(part, Advantage) for part in algorithm.parts.values())
    if algorithm.data != "prompts" or not estimates or CORRECTION in algorithm.needs().features:
        return []
    if stream.staleness:
        age, back = f"stream.staleness = {stream.staleness}: samples are {_steps(stream.staleness)} old", "staleness 0"
    elif stream.round > 1:
        age, back = f"stream.round = {stream.round}: samples are up to {_steps(stream.round - 1)} old", "round 1"
    else:
        return []
    losses = {slot: part for slot, part in algorithm.parts.items() if isinstance(part, Loss)}
    options = [
        f"--algorithm.{slot}.{loss.correction_option}" for slot, loss in losses.items() if loss.correction_option
    ]
    return [
        f"{age} when they are trained on, and no importance weight corrects for it: the loss takes them for samples of "
        f"the policy that its step begins with. Set {' or '.join([*options, f'--stream.{back}'])}."
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"
