"""Scored groups become a batch: one unit per trajectory, its tokens exactly those that the policy saw and sampled.

Columns of the batch:

=================  =====  ==============================================================================
``loss_mask``      token  bool, the policy sampled this token, or it is of an answer that the data gave
``last_action``    token  bool, the last sampled token of the trajectory
``gen_logprobs``   token  float32, as the generator reported (only where every sampled turn has them)
``temperature``    token  float32, what the token was sampled with (1 where not sampled)
``step_reward``    token  float32, weighted rewards of sources with ``credit = "step"``
``reward``         unit   float64, ``Trajectory.reward``, before shaping (only with ``scored``)
``score``          unit   float64, what the dynamic filter read (only with ``scored``)
``group, sample``  unit   int64, the trajectory's index
``own_tokens``     unit   int64, tokens that the policy sampled, or of the given answer
``truncated``      unit   bool, the last sampled turn ended because its budget was used up
``given``          unit   bool, the data gave the answer (``Needs.given``)
=================  =====  ==============================================================================

Shape suffixes: N tokens, U units, A the most action tokens that a unit has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlhf.errors import TrainingError
from rlhf.ops.batch import Batch, SequenceData, UnitData, pack
from rlhf.types import Group, Trajectory, Turn

ENV = "env"
"""Key of ``step_sources`` for the rewards that an environment gives to its turns."""


def assemble(
    groups: Sequence[Group], step_sources: Mapping[str, float] | None = None, scored: bool = True
) -> Batch | None:
    """Scored groups as a batch; None where no trajectory has a reward and a sampled token.

    Trajectories that failed, or to which no reward source applied, do not enter; their siblings do. A turn marked
    ``fresh`` starts a new sequence of the same unit. Tokens behind the last sampled one of a sequence are left out:
    nothing that is trained on depends on them.

    Args:
        step_sources: {reward source: weight} of the sources with ``credit = "step"``. Their ``RewardResult.steps``
            are placed at their (turn, token), times the weight; ``Trajectory.reward`` must not contain them. The key
            ``"env"`` places ``Turn.reward`` at the last token of its turn; a turn without tokens, at the last one that
            the policy sampled before it, and nowhere where that is none, as no token led to it. The steps of all other
            sources are in ``Trajectory.reward`` already.
        scored: False where rewards play no part (``Needs.reward = False``): trajectories without one enter too.

    Raises:
        TrainingError: a reward, log-prob or step that is not a finite number, or a step at a token that does not exist.
    """
    live = [t for g in groups for t in g.trajectories if t.status != "failed"]
    kept = [t for t in live if t.reward is not None or not scored]
    if not any(t.sampled_tokens for t in kept):
        return None
    with_logprobs = all(turn.logprobs is not None for t in kept for turn in t.turns if turn.sampled)
    batch = pack([_unit(t, step_sources or {}, with_logprobs, scored) for t in kept])
    last_N = torch.zeros(batch.tokens, dtype=torch.bool)
    action_index = batch.tok["loss_mask"].nonzero()[:, 0]
    last_U = torch.full((batch.units,), -1).scatter_reduce_(0, batch.unit_N[action_index], action_index, "amax")
    last_N[last_U[last_U >= 0]] = True
    return batch.with_column("tok", "last_action", last_N)


def compress(batch: Batch, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Token values of each unit's own action tokens, in order: ([U, A] left-aligned, zero-padded; bool mask [U, A])."""
    mask_N = batch.tok["loss_mask"]
    unit_A, place_A, count_U = _places(batch)
    width = int(count_U.max()) if batch.units else 0
    values_UA = values_N.new_zeros((batch.units, width))
    values_UA[unit_A, place_A] = values_N[mask_N]
    return values_UA, torch.arange(width) < count_U[:, None]


def expand(batch: Batch, values_UA: Tensor) -> Tensor:
    """The inverse of :func:`compress`: [U, A] back to [N], 0 at all other tokens."""
    unit_A, place_A, _ = _places(batch)
    values_N = values_UA.new_zeros(batch.tokens)
    values_N[batch.tok["loss_mask"]] = values_UA[unit_A, place_A]
    return values_N


def _places(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Per action token its unit and its place among the unit's action tokens; per unit their number."""
    unit_A = batch.unit_N[batch.tok["loss_mask"]]
    count_U = torch.bincount(unit_A, minlength=batch.units)
    return unit_A, torch.arange(unit_A.numel()) - (torch.cumsum(count_U, 0) - count_U)[unit_A], count_U


def _unit(trajectory: Trajectory, step_sources: Mapping[str, float], with_logprobs: bool, scored: bool) -> UnitData:
    given: dict[str, float] = {}
    if scored:
        reward = _finite(trajectory, "reward", float(trajectory.reward if trajectory.reward is not None else math.nan))
        score = reward if trajectory.score is None else _finite(trajectory, "score", float(trajectory.score))
        given = {"reward": reward, "score": score}
    steps = _step_rewards(trajectory, step_sources)
    contexts: list[list[int]] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.fresh or not contexts:
            if turn.sampled:
                raise TrainingError(
                    f"{_name(trajectory)}: turn {number} starts a sequence but was sampled; a sequence starts with the "
                    "context that the policy saw"
                )
            contexts.append([])
        contexts[-1].append(number)
    sequences = [_sequence(trajectory, numbers, steps, with_logprobs) for numbers in contexts]
    taught = [s for s in sequences if s is not None]
    if not taught:  # nothing was sampled: the prompt stands for the trajectory, whose reward is in its group's baseline
        taught = [_columns(trajectory, contexts[0][:1], steps, with_logprobs)]
    return UnitData(
        taught,
        {
            **given,
            "group": trajectory.index[0],
            "sample": trajectory.index[1],
            "own_tokens": trajectory.sampled_tokens,
            "truncated": trajectory.truncated,
            "given": trajectory.given,
        },
    )


def _sequence(
    trajectory: Trajectory, numbers: list[int], steps: Mapping[tuple[int, int], float], with_logprobs: bool
) -> SequenceData | None:
    """The turns up to the last sampled one; None where none is."""
    sampled = [i for i, n in enumerate(numbers) if trajectory.turns[n].sampled and trajectory.turns[n].ids]
    return _columns(trajectory, numbers[: sampled[-1] + 1], steps, with_logprobs) if sampled else None


def _columns(
    trajectory: Trajectory, numbers: list[int], steps: Mapping[tuple[int, int], float], with_logprobs: bool
) -> SequenceData:
    ids: list[int] = []
    tok: dict[str, list[bool] | list[float]] = {}
    mask: list[bool] = []
    temperature: list[float] = []
    logprobs: list[float] = []
    step_reward: list[float] = []
    for number in numbers:
        turn = trajectory.turns[number]
        n = len(turn.ids)
        ids += turn.ids
        mask += [turn.sampled] * n
        temperature += [_temperature(trajectory, turn)] * n
        step_reward += [steps.get((number, i), 0.0) for i in range(n)]
        if with_logprobs:
            logprobs += _logprobs(trajectory, number) if turn.sampled else [0.0] * n
    tok = {"loss_mask": mask, "temperature": temperature, "step_reward": step_reward}
    if with_logprobs:
        tok["gen_logprobs"] = logprobs
    return SequenceData(ids, tok)


def _logprobs(trajectory: Trajectory, number: int) -> list[float]:
    turn = trajectory.turns[number]
    values = list(turn.logprobs or ())
    if len(values) != len(turn.ids) or not all(map(math.isfinite, values)):
        raise TrainingError(
            f"{_name(trajectory)}: turn {number} needs {len(turn.ids)} finite log-probs from the generator, "
            f"got {len(values)}, of which {sum(map(math.isfinite, values))} finite"
        )
    return values


def _temperature(trajectory: Trajectory, turn: Turn) -> float:
    if not turn.sampled:
        return 1.0
    if not turn.temperature > 0:
        raise TrainingError(
            f"{_name(trajectory)} was sampled at temperature {turn.temperature}: training needs a temperature above 0, "
            "as log-probs are those of the distribution that was sampled from"
        )
    return float(turn.temperature)


def _step_rewards(trajectory: Trajectory, step_sources: Mapping[str, float]) -> dict[tuple[int, int], float]:
    placed: dict[tuple[int, int], float] = {}
    for source, weight in step_sources.items():
        if source == ENV:
            steps = _turn_rewards(trajectory)
        else:
            steps = trajectory.rewards[source].steps if source in trajectory.rewards else ()
        for number, token, value in steps:
            turn = trajectory.turns[number] if 0 <= number < len(trajectory.turns) else None
            if turn is None or not turn.sampled or not 0 <= token < len(turn.ids):
                what = "no such turn" if turn is None else f"{len(turn.ids)} tokens, sampled = {turn.sampled}"
                raise TrainingError(
                    f"{_name(trajectory)}: reward source {source!r} rewards token {token} of turn {number} ({what}); "
                    "a step reward belongs to a token that the policy sampled"
                )
            value = _finite(trajectory, f"step reward of {source!r}", float(value))
            placed[number, token] = placed.get((number, token), 0.0) + weight * value
    return placed


def _turn_rewards(trajectory: Trajectory) -> tuple[tuple[int, int, float], ...]:
    """(turn, token, reward) of what the environment gave."""
    found, last = [], None
    for number, turn in enumerate(trajectory.turns):
        if turn.sampled and turn.ids:
            last = (number, len(turn.ids) - 1)
        if turn.sampled and turn.reward is not None and last is not None:
            found.append((*last, float(turn.reward)))
    return tuple(found)


def _finite(trajectory: Trajectory, what: str, value: float) -> float:
    if not math.isfinite(value):
        raise TrainingError(f"{_name(trajectory)}: its {what} is {value}; it must be a finite number")
    return value


def _name(trajectory: Trajectory) -> str:
    group, sample = trajectory.index
    return f"sample {sample} of group {group} (row {trajectory.row.index} of {trajectory.row.source!r})"
