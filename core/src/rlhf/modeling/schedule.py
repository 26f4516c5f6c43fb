"""Learning rates as a pure function of the optimizer step, so that a checkpoint needs only the step."""

from __future__ import annotations

import math

from rlhf.errors import ConfigError
from rlhf.modeling.config import TrainingConfig


class Schedule:
    """``factor(step)`` in [0, 1] multiplies the peak rate; ``step`` counts optimizer steps from 0.

    Skipped steps count, and so do those that were planned and not taken (``Trainer.skip_updates``): the schedule ends
    with the run whatever happened on the way.
    """

    def __init__(self, config: TrainingConfig, total: int) -> None:
        if total <= 0 and (config.schedule != "constant" or config.warmup_ratio):
            what = f"warmup_ratio = {config.warmup_ratio}" if config.warmup_ratio else f"schedule = {config.schedule!r}"
            raise ConfigError(
                f"{what} needs the number of optimizer steps of the run, which is not known here (total_updates = "
                f"{total}). Use schedule = 'constant' with warmup_steps, or give the run a length."
            )
        self.shape = config.schedule
        self.total = total
        self.warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total)
        self.floor = 0.0
        if config.schedule == "cosine_with_min":
            self.floor = 0.1 if config.min_lr_ratio is None else config.min_lr_ratio

    def factor(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        if self.shape == "constant":
            return 1.0
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        if self.shape == "linear":
            return 1.0 - done
        return self.floor + (1.0 - self.floor) * 0.5 * (1.0 + math.cos(math.pi * done))
