"""Start-up warnings for settings that are allowed but rarely intended."""

from __future__ import annotations

from rlhf.interfaces import Advantage, Algorithm, Loss

from rlhf_runtime.config.online_validation import CORRECTION
from rlhf_runtime.config.runfile import RunFile


def stream_notes(config: RunFile, algorithm: Algorithm) -> list[str]:
    """A warning where samples come from an older policy and no importance weight corrects for it.

    It applies only to algorithms with an advantage. An algorithm that only compares answers does not assume that they
    come from the current policy.
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
        f"{age} when they are trained on, and no importance weight corrects for it: the loss treats them as samples of "
        f"the policy at the start of the step. Set {' or '.join([*options, f'--stream.{back}'])}."
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"
