"""The training batches of an online run: generated in waves, continuously, or read from a recorded run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_runtime.observe.run_directory import RunDirectory
from rlhf_runtime.observe.timeline import Timeline
from rlhf_runtime.samples.acceptance import Acceptance
from rlhf_runtime.samples.continuous_stream import ContinuousStream
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.recorded_stream import RecordedStream
from rlhf_runtime.samples.sampling import Sampler, training_settings
from rlhf_runtime.samples.stream import Stream
from rlhf_runtime.samples.wave_stream import WaveStream
from rlhf_runtime.setup.prepare import Prepared


def training_stream(
    prepared: Prepared,
    sampler: Sampler,
    failures: Failures,
    timeline: Timeline,
    count: Callable[[str, int, int], None],
) -> Stream:
    """The stream that ``[stream]`` asks for.

    Args:
        failures: counts its failed samples.
        count: shows how many (samples, or groups) are ready while a step waits for them.
    """
    config, section, needs = prepared.config, prepared.config.stream, prepared.algorithm.needs()
    if section.replay is not None:
        recorded = functools.partial(RunDirectory.rollouts_of, Path(section.replay))
        return RecordedStream(recorded, prepared.data.row, section.staleness + section.round - 1)
    settings = training_settings(config, failures, needs.given)
    common: dict[str, Any] = {
        "batch_size": config.data.batch_size,
        "total_steps": prepared.total_steps,
        "staleness": section.staleness,
        "acceptance": Acceptance(section.filter, section.on_failed_sample, needs.group_min, needs.reward, timeline),
        "row_order": prepared.data.chosen,
    }
    if section.mode == "waves":
        common["count"] = functools.partial(count, "samples")
        return WaveStream(prepared.data, sampler.rollouts, settings, round=section.round, **common)
    common["count"] = functools.partial(count, "groups")
    return ContinuousStream(
        prepared.data, sampler.rollouts, settings, order=section.order, oversample=section.oversample, **common
    )
