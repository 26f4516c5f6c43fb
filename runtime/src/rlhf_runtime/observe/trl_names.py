"""The names that TRL gives to the metrics of a run, for dashboards with earlier runs."""

from __future__ import annotations

import re
from collections.abc import Mapping

TRL_NAMES: Mapping[str, str] = {
    "step": "global_step",
    "epoch": "epoch",
    "time/step": "step_time",
    "policy/loss": "loss",
    "policy/grad_norm": "grad_norm",
    "policy/lr": "learning_rate",
    "policy/aux_loss": "aux_loss",
    "policy/entropy": "entropy",
    "policy/token_accuracy": "mean_token_accuracy",
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
"""{name here: name in TRL 1.16, without the prefix ``train/`` or ``eval/`` that transformers' integrations add}."""
TRL_NAMES_OF_SCORES: Mapping[str, str] = {
    "policy/accuracy": "accuracy",
    "policy/margin": "margin",
    "policy/score_mean": "mean_reward",
}
"""The same for reward models, whose metrics have :data:`SCORES`."""
SCORES = "policy/score_mean"
_SOURCE = re.compile(r"reward/(?P<source>.+)/(?P<part>mean|std)")


def trl_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """A line of metrics with the names of TRL, for dashboards with earlier runs. A name without a counterpart in TRL is
    kept. Two names that map to the same TRL name never occur in one line."""
    scores = SCORES in metrics or SCORES.replace("policy/", "eval/") in metrics
    table = {**TRL_NAMES, **TRL_NAMES_OF_SCORES} if scores else TRL_NAMES
    return {_trl_name(name, table): value for name, value in metrics.items()}


def _trl_name(name: str, table: Mapping[str, str]) -> str:
    if name in table:
        return f"train/{table[name]}"
    if (match := _SOURCE.fullmatch(name)) is not None:
        return f"train/rewards/{match['source']}/{match['part']}"
    other = name.removeprefix("eval/")
    return f"eval/{table[f'policy/{other}']}" if other != name and f"policy/{other}" in table else name
