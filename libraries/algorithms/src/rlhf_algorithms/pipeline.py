"""From reward to advantage: the stages in their published order, one function per stage.

1. ``Trajectory.reward``, the weighted sum of the reward sources, enters as the column ``reward``.
2. The dynamic filter has already read ``score`` when the batch was collected.
3. The shaper (``algorithm.shaping``); raw and shaped reward are both reported.
4. :func:`subtract_kl` if the KL is subtracted before the baseline, then :func:`baseline`, the baseline of the
   advantage.
5. :func:`clip_rewards`.
6. :func:`token_rewards`: step rewards at their tokens, other rewards at the last action token, minus beta KL per token.
7. :func:`returns`: ``returns`` of the advantage, over each trajectory's action tokens only; then
   :func:`add_turn_credit` if the estimator gives credit to single turns.
8. :func:`normalise`: over the whole rollout batch, weighted by tokens.

An algorithm with another order overrides ``PolicyGradient.stages()`` and calls these functions itself.

Shape suffixes: N tokens, U units (trajectories), A action tokens of a unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from rlhf.errors import TrainingError
from rlhf.interfaces.advantage import Advantage, baseline_of, reads_turns
from rlhf.ops.batch import Batch
from rlhf.ops.groups import group_std, one_per_group
from rlhf.ops.spans import empty, masked
from rlhf.ops.trajectories import compress, expand
from torch import Tensor

from rlhf_algorithms.kl import Estimator, kl_estimate

Shaper = Callable[[Tensor, Batch], Tensor]
"""``shaper(r_U, batch) -> r_U``, float64."""

Metrics = dict[str, float]

MIN_VARIANCE = 1e-8
NORMALISATIONS = ("none", "center", "whiten")
BLOCK, BLOCK_WITH_VALUES = 2**18, 2**22
"""Maximum number of values in a matrix [U, A] that an advantage receives. The first fits into a processor's cache. With
values, the recursion goes from token to token and costs time per token position, so a block should hold many
trajectories."""


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """KL to the reference inside the reward; reads the columns ``old_logprobs`` and ``ref_logprobs``."""

    beta: float
    estimator: Estimator = "k1"
    before_baseline: bool = False
    """The trajectory's summed KL lowers its reward before the baseline, instead of per token after it."""


def credit(
    batch: Batch,
    advantage: Advantage,
    *,
    kl: KLPenalty | None = None,
    shaper: Shaper | None = None,
    reward_clip: tuple[float, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[Batch, Metrics]:
    """Run all stages. ``weights``, {reward source: weight}, is for advantages that treat each source separately.

    Reads the columns of :func:`rlhf.ops.trajectories.assemble`. If the advantage needs values, it also reads
    ``old_values`` and ``bootstrap``, the value after the last token of truncated samples.

    Returns: the batch with the token column ``advantages`` and, with values, ``returns``; the metrics.
    """
    raw_U = batch.unit["reward"]
    shaped_U = raw_U if shaper is None else shaper(raw_U, batch)
    r_U = shaped_U
    kl_N: Tensor | None = None
    if kl is not None:
        kl_N = kl_estimate(batch.column("old_logprobs"), batch.column("ref_logprobs"), kl.estimator)
        if kl.before_baseline:
            r_U = subtract_kl(batch, r_U, kl_N, kl.beta)
    # turn_credit() has a baseline of its own, so it gets the rewards before this one.
    whole_U = r_U
    r_U = baseline(batch, advantage, r_U, weights)
    r_U = clip_rewards(r_U, reward_clip)
    per_token = kl is not None and not kl.before_baseline
    R_N = token_rewards(batch, r_U, kl_N if per_token else None, kl.beta if kl else 0.0)
    batch, raw_advantages_N = returns(batch, advantage, R_N)
    if reads_turns(advantage):
        raw_advantages_N = add_turn_credit(batch, advantage, whole_U, raw_advantages_N)
    advantages_N = raw_advantages_N
    if advantage.normalise != "none":
        advantages_N = normalise(raw_advantages_N, batch.tok["loss_mask"], advantage.normalise)
    batch = batch.with_column("tok", "advantages", advantages_N, over=None)  # 0 at masked tokens already
    metrics = reward_metrics(batch, shaped_U, r_U) | length_metrics(batch) | advantage_metrics(batch, raw_advantages_N)
    if kl_N is not None:
        metrics["kl/reference"] = _mean(masked(kl_N, batch.tok["loss_mask"]))
    return batch, metrics


def subtract_kl(batch: Batch, r_U: Tensor, kl_N: Tensor, beta: float) -> Tensor:
    """Stage 4, optional: r_i -= beta * sum_t kl_it, so the baseline sees the penalty."""
    kl_UA, _ = compress(batch, kl_N)
    return r_U - beta * kl_UA.double().sum(1)


def baseline(batch: Batch, advantage: Advantage, r_U: Tensor, weights: Mapping[str, float] | None = None) -> Tensor:
    """Stage 4: subtract the baseline of the advantage."""
    sources = {name: (weight, batch.unit[f"reward.{name}"]) for name, weight in (weights or {}).items()}
    # A copy, because r_U may be the batch's own column: an estimator that works in place would change the metrics.
    values_U: object = baseline_of(
        advantage,
        r_U.clone(),
        batch.unit["group"],
        own_tokens_N=batch.unit["own_tokens"],
        sources=sources,
        greedy_N=batch.unit.get("greedy"),
        key_N=batch.unit.get("key"),
        sample_N=batch.unit["sample"],
    )
    if not isinstance(values_U, Tensor) or values_U.shape != r_U.shape:
        raise TrainingError(
            f"baseline() of advantage {advantage.name!r} must return one value for each of the {len(r_U)} rewards, a "
            f"tensor of shape {tuple(r_U.shape)}, got {_kind_of(values_U)}"
        )
    return values_U


def clip_rewards(r_U: Tensor, clip: tuple[float, float] | None) -> Tensor:
    """Stage 5: clip the values after the baseline."""
    return r_U if clip is None else r_U.clamp(*clip)


def token_rewards(batch: Batch, r_U: Tensor, kl_N: Tensor | None, beta: float) -> Tensor:
    """Stage 6: float32 [N], 0 outside the action tokens.

    R_t = step reward at t + [t is the trajectory's last action token] r_i - beta kl_t.
    """
    mask_N = batch.tok["loss_mask"]
    last_L = torch.from_numpy(np.flatnonzero(batch.tok["last_action"].numpy() & mask_N.numpy()))
    # The unit of a token is the first one that ends after it.
    unit_L = torch.searchsorted(torch.tensor(batch.tokens_per_unit()).cumsum(0), last_L, right=True)
    step_N = batch.tok["step_reward"] if "step_reward" in batch.tok else torch.zeros(batch.tokens)
    if kl_N is not None:
        step_N = step_N.double()
    R_N = torch.where(mask_N, step_N, step_N.new_zeros(()), out=empty(step_N.shape, step_N.dtype))
    R_N[last_L] = (r_U[unit_L] + step_N[last_L].double()).to(R_N.dtype)
    if kl_N is None:
        return R_N
    return torch.where(mask_N, R_N - beta * kl_N.double(), 0.0).float()


def returns(batch: Batch, advantage: Advantage, R_N: Tensor) -> tuple[Batch, Tensor]:
    """Stage 7: (the batch, with the column ``returns`` if there are values; raw advantages, float32 [N]).

    The advantage gets the trajectories in blocks. A matrix of all of them would be as wide as the longest answer.
    """
    boot_U = bootstrap_values(batch) if advantage.needs_values else None
    columns = [empty((batch.tokens,), torch.float32) for _ in range(1 + advantage.needs_values)]
    end = 0
    for first, last in _blocks(batch, BLOCK_WITH_VALUES if advantage.needs_values else BLOCK):
        block = batch.between(first, last)
        begin, end = end, end + block.tokens
        boot = None if boot_U is None else boot_U[first:last]
        for values_N, block_values_N in zip(columns, _returns(block, advantage, R_N[begin:end], boot), strict=False):
            values_N[begin:end] = block_values_N
    return batch.with_column("tok", "returns", columns[1]) if advantage.needs_values else batch, columns[0]


def _blocks(batch: Batch, max_values: int) -> Iterator[tuple[int, int]]:
    """(first unit, last + 1) of each block. A block has as many units as fit into a matrix of ``max_values`` values, at
    least one."""
    first, width = 0, 0
    for unit, tokens in enumerate(batch.tokens_per_unit()):
        width = max(width, tokens)
        if unit > first and width * (unit + 1 - first) > max_values:
            yield first, unit
            first, width = unit, tokens
    yield first, batch.units


def _returns(block: Batch, advantage: Advantage, R_N: Tensor, boot_U: Tensor | None) -> list[Tensor]:
    """Advantages and returns of a block of trajectories, each float32 [N]."""
    R_UA, mask_UA = compress(block, R_N)
    values_UA = compress(block, block.column("old_values").float())[0] if advantage.needs_values else None
    estimates = advantage.returns(R_UA, mask_UA, values_UA, boot_U)
    if not isinstance(estimates, tuple) or len(estimates) != 2 or not all(isinstance(e, Tensor) for e in estimates):
        parts = ", ".join(map(_kind_of, estimates)) if isinstance(estimates, tuple) else ""
        raise TrainingError(
            f"returns() of advantage {advantage.name!r} must return (advantages, returns), two tensors of shape "
            f"{tuple(mask_UA.shape)}, got {type(estimates).__name__}{parts and f' of {parts}'}"
        )
    flat: list[Tensor] = []
    for label, estimate_UA in zip(("advantages", "returns"), estimates, strict=True):
        if flat and estimate_UA is estimates[0]:  # without a critic they are the same
            return [flat[0], flat[0]]
        if estimate_UA.shape == mask_UA.shape:
            flat.append(expand(block, estimate_UA.float()))
        if estimate_UA.shape != mask_UA.shape or not all(edge.isfinite() for edge in flat[-1].aminmax()):
            raise TrainingError(
                f"advantage {advantage.name!r} must return finite {label} of shape {tuple(mask_UA.shape)}, got shape "
                f"{tuple(estimate_UA.shape)} with {int((~estimate_UA.isfinite()).sum())} values that are not finite"
            )
    return flat


def add_turn_credit(batch: Batch, advantage: Advantage, r_U: Tensor, advantages_N: Tensor) -> Tensor:
    """Stage 7, optional: add the advantage's credit of each single turn to the turn's tokens.

    Args:
        r_U: the trajectories' rewards before the baseline.
    """
    mask_N = batch.tok["loss_mask"]
    turns_A = torch.stack([batch.unit_N[mask_N], batch.tok["turn"][mask_N]], 1)
    turns_M2, turn_A = torch.unique_consecutive(turns_A, return_inverse=True, dim=0)
    unit_M = turns_M2[:, 0]
    state_M = torch.zeros_like(unit_M).index_copy_(0, turn_A, batch.tok["state"][mask_N])
    reward_M = torch.zeros(len(unit_M), dtype=torch.float64).index_add_(0, turn_A, batch.tok["turn_reward"][mask_N])
    # Everything that no trained token of a turn earned: rewards of sources, shaping.
    left_U = r_U - torch.zeros_like(r_U).index_add_(0, unit_M, reward_M)
    last_M = torch.ones_like(unit_M, dtype=torch.bool)
    last_M[:-1] = unit_M[1:] != unit_M[:-1]
    reward_M[last_M] += left_U[unit_M[last_M]]
    credit_M: object = advantage.turn_credit(reward_M, state_M, unit_M)
    if not isinstance(credit_M, Tensor):
        raise TrainingError(
            f"turn_credit() of advantage {advantage.name!r} must return {len(unit_M)} finite values, got "
            f"{_kind_of(credit_M)} in place of a tensor"
        )
    if credit_M.shape != unit_M.shape or not bool(credit_M.isfinite().all()):
        raise TrainingError(
            f"turn_credit() of advantage {advantage.name!r} must return {len(unit_M)} finite values, got shape "
            f"{tuple(credit_M.shape)} with {int((~credit_M.isfinite()).sum())} values that are not finite"
        )
    credit_N = torch.zeros(batch.tokens).masked_scatter_(mask_N, credit_M[turn_A].float())
    return advantages_N + credit_N


def bootstrap_values(batch: Batch) -> Tensor | None:
    """[U]: the value after the last action token of truncated trajectories, and 0 for complete ones. None if the column
    ``bootstrap`` is absent."""
    if "bootstrap" not in batch.tok:
        return None
    value_N = torch.where(batch.tok["last_action"], batch.tok["bootstrap"].float(), torch.zeros(batch.tokens))
    value_U = torch.zeros(batch.units).index_add_(0, batch.unit_N, value_N)
    return torch.where(batch.unit["truncated"], value_U, torch.zeros_like(value_U))


def normalise(values_N: Tensor, mask_N: Tensor, mode: Literal["none", "center", "whiten"]) -> Tensor:
    """Stage 8: subtract the mean over all tokens under the mask; ``whiten`` also divides by the square root of their
    population variance, clamped at 1e-8. float32 [N], 0 where masked."""
    if mode not in NORMALISATIONS:
        raise TrainingError(f"Advantage.normalise is {mode!r}; allowed: {', '.join(map(repr, NORMALISATIONS))}")
    if mode == "none":
        return torch.where(mask_N, values_N, 0.0).float()
    values = masked(values_N, mask_N).double()
    if values.numel():
        values -= values.mean()
        if mode == "whiten":
            values /= values.square().mean().clamp(min=MIN_VARIANCE).sqrt()
    return torch.zeros(values_N.shape).masked_scatter_(mask_N, values.float())


# ---------------------------------------------------------------------------------------- metrics


def reward_metrics(batch: Batch, shaped_U: Tensor, r_U: Tensor) -> Metrics:
    """Raw, shaped and final rewards, and the share of groups whose rewards differ. If step rewards are placed at
    tokens, also ``reward/steps``, the mean of their sum over a trajectory, and ``reward/total``, its sum with
    ``reward/mean``."""
    raw_U, group_U = batch.unit["reward"], batch.unit["group"]
    std_G = one_per_group(group_std(raw_U, group_U), group_U)
    step_N = batch.tok.get("step_reward", torch.zeros(1))
    # Most batches have no step rewards. Two numbers tell, without a copy of the tokens' rewards.
    step_reward_A = masked(step_N, batch.tok["loss_mask"]) if any(step_N.aminmax()) else step_N[:0]
    steps: Metrics = {}
    if step_reward_A.numel() and any(step_reward_A.aminmax()):  # at least one is not 0
        steps_mean = float(step_reward_A.double().sum()) / batch.units
        steps = {"reward/steps": steps_mean, "reward/total": _mean(raw_U) + steps_mean}
    return steps | {
        "reward/mean": _mean(raw_U),
        "reward/std": _std(raw_U),
        "reward/shaped": _mean(shaped_U),
        "reward/after_baseline_std": _std(r_U),
        "reward/group_std": _mean(std_G),
        "reward/groups_all_equal": _mean((std_G == 0).double()),
    }


def length_metrics(batch: Batch) -> Metrics:
    """Lengths of answers, in tokens that the policy sampled."""
    own_U = batch.unit["own_tokens"].double()
    return {
        "length/mean": _mean(own_U),
        "length/max": float(own_U.max()),
        "length/truncated": _mean(batch.unit["truncated"].double()),
    }


def advantage_metrics(batch: Batch, raw_advantages_N: Tensor) -> Metrics:
    """Mean and standard deviation of the advantages before normalisation, and the largest after it; with values also
    the share of the returns' variance that they explain."""
    mask_N = batch.tok["loss_mask"]
    raw_A = masked(raw_advantages_N, mask_N)
    metrics = {
        "advantage/mean": _mean(raw_A),
        "advantage/std": _std(raw_A),
        "advantage/abs_max": max(abs(float(edge)) for edge in batch.tok["advantages"].aminmax()),
    }
    if "returns" in batch.tok:
        returns_A, values_A = (masked(batch.tok[name], mask_N).double() for name in ("returns", "old_values"))
        spread = _std(returns_A) ** 2
        explained = 1 - _std(returns_A - values_A) ** 2 / spread if spread > 0 else 0.0
        metrics |= {"value/mean": _mean(values_A), "value/explained_variance": explained}
    return metrics


def _kind_of(value: object) -> str:
    """Type of what an advantage returned, for messages; of a tensor its shape."""
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _mean(values: Tensor) -> float:
    """The mean in float64; 0 if there are no values, so that an empty answer does not give NaN."""
    return float(values.numpy().mean(dtype=np.float64)) if values.numel() else 0.0


def _std(values: Tensor) -> float:
    """Population standard deviation in float64; 0 if there are no values."""
    return float(values.numpy().std(dtype=np.float64)) if values.numel() else 0.0
