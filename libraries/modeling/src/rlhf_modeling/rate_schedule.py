"""Learning rates as a pure function of the optimizer step. A checkpoint needs only the step."""

from __future__ import annotations

import math

from rlhf.errors import ConfigError

from rlhf_modeling.config import TrainingConfig

DECAY_RATIO = 0.1
"""Default ``decay_ratio`` of ``wsd``: Hu et al. 2024 found it to be enough."""
ENDLESS = ("constant", "inverse_sqrt")
"""Schedules that do not depend on the length of the run."""


class RateSchedule:
    """``factor(step)`` in [0, 1] multiplies the peak rate; ``step`` counts optimizer steps from 0.

    Skipped steps count, and so do scheduled steps that the run did not take (``Trainer.skip_updates``). So the schedule
    always ends with the run.
    """

    def __init__(self, config: TrainingConfig, total: int) -> None:
        if total <= 0 and (config.schedule not in ENDLESS or config.warmup_ratio):
            option = (
                f"warmup_ratio = {config.warmup_ratio}" if config.warmup_ratio else f"schedule = {config.schedule!r}"
            )
            raise ConfigError(
                f"{option} needs the number of optimizer steps of the run, which is not known here (total_updates = "
                f"{total}). Use schedule = 'constant' with warmup_steps, or set the length of the run."
            )
        self.shape = config.schedule
        self.total = total
        self.warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
        self.floor = config.min_lr_ratio or 0.0
        if config.schedule == "cosine_with_min" and config.min_lr_ratio is None:
            self.floor = 0.1
        decay_ratio = DECAY_RATIO if config.decay_ratio is None else config.decay_ratio
        self.decay = max(1, math.ceil(decay_ratio * total))
        if 0 < total <= config.warmup_steps:
            raise ConfigError(
                f"trainer.warmup_steps = {config.warmup_steps}: the run has {total} optimizer steps, so the learning "
                "rate would never reach trainer.lr. Make it smaller than that, or set --trainer.warmup_ratio instead."
            )
        if self.shape == "wsd" and self.warmup + self.decay > total:
            raise ConfigError(
                f"schedule = 'wsd': the run has {total} optimizer steps, fewer than the {self.warmup} of warm-up and "
                f"{self.decay} of decay together. Make warmup_steps (warmup_ratio) or decay_ratio smaller."
            )

    def factor(self, step: int) -> float:
        if step < self.warmup:
            # Neither 0 in the first step, which would change nothing, nor 1 before the warm-up is over.
            return (step + 1) / (self.warmup + 1)
        if self.shape == "constant":
            return 1.0
        if self.shape == "wsd":
            left = max(0.0, min(1.0, (self.total - step) / self.decay))
            return self.floor + (1.0 - self.floor) * left
        if self.shape == "inverse_sqrt":
            return math.sqrt((self.warmup + 1) / (step + 1))
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.shape == "linear":
            return 1.0 - done
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))
