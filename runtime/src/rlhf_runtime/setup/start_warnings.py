"""Start-up warnings for settings that are allowed but rarely intended."""

from __future__ import annotations

from rlhf.interfaces import GENERATOR, Advantage, Algorithm, Generator, Launcher, Loss, Rollout

from rlhf_runtime.config.online_validation import CORRECTION
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.stream_validation import ANSWERS
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.layouts import TOOLS


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


def idle_engine_notes(config: RunFile, launcher: type[Launcher] | None, generator: type[Generator] | None) -> list[str]:
    """A hint where engines wait while the policy learns, though older samples are allowed and the engines have devices
    of their own. Waves stay the default, because only they give the same run for the same seed."""
    stream, place = config.stream, config.placement.get(GENERATOR)
    shared = place is not None and place.share is not None
    if stream.mode != "waves" or not stream.staleness or shared or stream.replay is not None:
        return []
    if launcher is None or generator is None or ANSWERS not in launcher.capabilities & generator.capabilities:
        return []
    return [
        f"stream.staleness = {stream.staleness} and stream.mode = 'waves': the engines wait while the policy learns. "
        "With --stream.mode continuous they go on. The run then depends on the clock; `rlhf replay` repeats it."
    ]


def tool_notes(rollout: Rollout, data: TrainData) -> list[str]:
    """A note where rows have tools and the rollout shows others."""
    return [
        f"data.{use} {source.name!r} has the column {TOOLS!r}, which the rollout {rollout.name!r} does not read: it "
        "shows the policy tools of its own"
        for use, sources in data.sources.items()
        for source in sources
        if rollout.needs_messages and source.layout is not None and TOOLS in source.layout.columns
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"
