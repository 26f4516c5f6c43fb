"""The best evaluation of a run so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlhf.errors import CheckpointError, ConfigError, did_you_mean

DEFAULT_METRICS = ("eval/pass@1", "eval/score", "eval/reward", "eval/loss")
"""The default of ``eval.metric`` is the first of these metrics that the evaluation has. The score is before the reward,
because the reward of an evaluation has no step rewards: it is always 0 if the run has no others."""
_LOWER_IS_BETTER = ("loss", "nll", "perplexity", "error", "divergence", "kl", "truncated", "unscored")


class BestTracker:
    """Follows one metric over the evaluations.

    Args:
        metric: its name, with or without ``eval/``; None: the first of pass@1, score, reward and loss that exists.
        mode: ``max``, ``min`` or ``auto``. ``auto`` decides by the metric's name: ``min`` for losses, terms of losses
            (``loss/<term>``), divergences and the shares of truncated or unscored answers, ``max`` for all others.
        patience: stop after this many evaluations in a row without improvement; None: never.

    Only a strictly better value is an improvement. NaN counts as an evaluation without improvement.
    """

    def __init__(
        self, metric: str | None = None, mode: Literal["auto", "max", "min"] = "auto", patience: int | None = None
    ) -> None:
        if mode not in ("auto", "max", "min"):
            raise ConfigError(f"eval.mode is {mode!r}; allowed: 'auto', 'max', 'min'")
        if patience is not None and patience < 1:
            raise ConfigError(f"eval.patience is {patience}; allowed: 1 or more evaluations, or not set")
        self.metric, self.mode, self.patience = metric, mode, patience
        self.value: float | None = None
        self.step: int | None = None
        self.waited = 0
        """Evaluations since the last improvement."""

    def update(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Returns whether this evaluation is the best so far.

        The metric is absent if too few answers got a reward, or if no sample has the number ``env/KEY`` or
        ``rollout/KEY`` that an earlier evaluation had. Such an evaluation counts as one without improvement. Raises
        ConfigError if the evaluation does not have the metric for another reason.
        """
        has_earlier, unscored = self.value is not None or self.waited > 0, metrics.get("eval/unscored", 0.0)
        try:
            self.metric, value = self._find(metrics)
        except ConfigError:
            if not (unscored == 1 or (has_earlier and (unscored > 0 or is_number_of_samples(self.metric or "")))):
                raise
            value = math.nan
        sign = 1.0 if self._direction() == "max" else -1.0
        improved = not math.isnan(value) and (self.value is None or sign * value > sign * self.value)
        if improved:
            self.value, self.step, self.waited = value, step, 0
        else:
            self.waited += 1
        return improved

    @property
    def exhausted(self) -> bool:
        """Whether ``patience`` evaluations in a row brought no improvement."""
        return self.patience is not None and self.waited >= self.patience

    @property
    def why_exhausted(self) -> str:
        """The reason to end the run if patience is exhausted; else empty."""
        if not self.exhausted:
            return ""
        return (
            f"{self.metric} has not improved for {self.waited} evaluations; the best value, {self.value}, was after "
            f"step {self.step}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "mode": self._direction(),
            "value": None if self.value is None else repr(self.value),  # repr: infinity is no JSON number
            "step": self.step,
            "waited": self.waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state belongs to another metric: their values are not comparable."""
        saved_metric, metric = state["metric"], self.metric
        if state["value"] is None:  # no value to compare with; the metric's name may have been misspelled before
            self.waited = int(state["waited"])
            return
        is_same = saved_metric is None or metric is None or saved_metric in (metric, f"eval/{metric}")
        if is_same:
            self.metric = saved_metric or metric
        if not is_same or state["mode"] != self._direction():
            raise CheckpointError(
                f"the best value in the checkpoint is of {saved_metric!r} ({state['mode']}), but this run uses "
                f"{metric!r} ({self.mode}). Restore eval.metric and eval.mode, or start a new run."
            )
        self.value = float(state["value"])
        self.step, self.waited = state["step"], int(state["waited"])

    def _direction(self) -> str:
        if self.mode != "auto":
            return self.mode
        *front, last = (self.metric or "").split("/")
        return "min" if "loss" in front or last.endswith(_LOWER_IS_BETTER) else "max"

    def _find(self, metrics: Mapping[str, float]) -> tuple[str, float]:
        """The name of the metric and its value."""
        candidates = DEFAULT_METRICS if self.metric is None else (self.metric, f"eval/{self.metric}")
        for name in candidates:
            if name in metrics:
                return name, float(metrics[name])
        name = f"eval/{(self.metric or '').removeprefix('eval/')}"
        reward = f"{name.removesuffix('/score')}/reward"
        # An evaluation has no score if each is equal to the answer's reward (evaluation_metrics).
        if name.endswith("/score") and reward in metrics:
            return name, float(metrics[reward])
        present = sorted(name for name in metrics if name.startswith("eval/")) or sorted(metrics)
        if self.metric is None:
            raise ConfigError(
                f"the evaluation has neither pass@1, a reward nor a loss; set eval.metric to one of {present}"
            )
        raise unknown_metric(self.metric, present)


def is_number_of_samples(metric: str) -> bool:
    """Whether the metric is a number that samples report. Its name is unknown until there are samples."""
    return metric.removeprefix("eval/").startswith(("env/", "rollout/", "agent/"))


def unknown_metric(metric: str, present: Sequence[str]) -> ConfigError:
    """The error if an evaluation does not have the metric that ``eval.metric`` names."""
    return ConfigError(
        f"eval.metric is {metric!r}, which the evaluation does not report; it reports {', '.join(present)}."
        f"{did_you_mean(metric.removeprefix('eval/'), [name.removeprefix('eval/') for name in present])}"
    )
