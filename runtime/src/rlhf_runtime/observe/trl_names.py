"""The metrics of a step under the names that TRL 1.16 gives to them, for dashboards with earlier runs.

The names are those that transformers' integrations write, with ``train/`` or ``eval/`` in front. Where a name here has
no counterpart it stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

NAMES: Mapping[str, str] = {
    "step": "global_step",
    "epoch": "epoch",
    "time/step": "step_time",
    "policy/loss": "loss",
    "policy/grad_norm": "grad_norm",
    "policy/lr": "learning_rate",
    "policy/aux_loss": "aux_loss",
    "policy/entropy": "entropy",
    "policy/kl_reference": "kl",
    "policy/kl": "kl",
    "policy/clip_fraction": "clip_ratio/region_mean",
    "policy/correction_weight": "sampling/importance_sampling_ratio/mean",
    "kl/reference": "kl",
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "reward/groups_all_equal": "frac_reward_zero_std",
    "reward/SOURCE/mean": "rewards/SOURCE/mean",
    "reward/SOURCE/std": "rewards/SOURCE/std",
    "length/mean": "completions/mean_length",
    "length/max": "completions/max_length",
    "length/truncated": "completions/clipped_ratio",
    "policy/accuracy": "rewards/accuracies",
    "policy/reward_margin": "rewards/margins",
    "policy/chosen_reward": "rewards/chosen",
    "policy/rejected_reward": "rewards/rejected",
    "policy/desirable_reward": "rewards/chosen",
    "policy/undesirable_reward": "rewards/rejected",
    "policy/chosen_logprobs": "logps/chosen",
    "policy/rejected_logprobs": "logps/rejected",
    "policy/desirable_logprobs": "logps/chosen",
    "policy/undesirable_logprobs": "logps/rejected",
}
"""{name here: name of TRL, without what is in front}."""
OF_SCORES: Mapping[str, str] = {
    "policy/accuracy": "accuracy",
    "policy/margin": "margin",
    "policy/score_mean": "mean_reward",
}
"""The same of reward models, whose metrics have :data:`SCORES`."""
SCORES = "policy/score_mean"
_SOURCE = re.compile(r"reward/(?P<source>.+)/(?P<part>mean|std)")


def trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """A line of metrics with the names of TRL. Two names here that have one there are never in one line."""
    scores = SCORES in metrics or SCORES.replace("policy/", "eval/") in metrics
    table = {**NAMES, **OF_SCORES} if scores else NAMES
    return {_name(name, table): value for name, value in metrics.items()}


def _name(name: str, table: Mapping[str, str]) -> str:
    if name in table:
        return f"train/{table[name]}"
    if (match := _SOURCE.fullmatch(name)) is not None:
        return f"train/rewards/{match['source']}/{match['part']}"
    other = name.removeprefix("eval/")
    return f"eval/{table[f'policy/{other}']}" if other != name and f"policy/{other}" in table else name
