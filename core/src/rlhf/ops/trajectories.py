"""Scored groups become a batch: one unit per trajectory, with exactly the tokens that the policy saw and sampled.

Columns of the batch:

====================  =====  ==============================================================================
``loss_mask``         token  bool, the policy sampled this token, or it belongs to a given answer
``observation_mask``  token  bool, the token is of an observation (only with ``observations``)
``last_action``       token  bool, the last sampled token of the trajectory
``experts``           token  int16 [N, layers, experts of a token], the recorded experts, -1 without a record
                             (only if there is one)
``gen_logprobs``      token  float32, as the generator reported (only if every sampled turn has them)
``temperature``       token  float32, at which the token was sampled (1 if not sampled)
``step_reward``       token  float32, weighted rewards of sources with ``credit = "step"``
``turn``              token  int64, number of its turn in the trajectory, -1 if not sampled (only with ``turns``)
``turn_reward``       token  float64, the environment's reward of a turn, at its last token (likewise)
``state``             token  int64, equal for turns of one group that follow the same observation (likewise)
``reward``            unit   float64, ``Trajectory.reward``, before shaping (only with ``scored``)
``reward.SOURCE``     unit   float64, value of a source before its weight, without rewards in ``step_reward``, NaN:
                             none (only those of ``rewards``)
``greedy``            unit   float64, reward of the greedy answer to the same prompt (only with ``greedy``)
``key``               unit   int64, equal for one agent and rows of one source with equal values in columns (only
                             with ``key``)
``score``             unit   float64, the score that the dynamic filter read (only with ``scored``)
``group, sample``     unit   int64, the trajectory's index; of several agents that the policy plays, each has a group
                             number of its own
``own_tokens``        unit   int64, number of tokens that the policy sampled, or of the given answer
``truncated``         unit   bool, the last sampled turn ended because its budget was used up
``is_demonstration``  unit   bool, the answer comes from the data (``Needs.demonstration_share``,
                             ``Needs.demonstrations_per_group``)
====================  =====  ==============================================================================

An *observation* is a turn that the policy did not sample and that follows a sampled turn of the same sequence: the
reply of an environment or a tool. The prompt, an environment's opening and a rewritten context are not observations.

Shape suffixes: N tokens, U units, A the largest number of action tokens of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rlhf.errors import TrainingError
from rlhf.ops.batch import Batch
from rlhf.ops.experts import EXPERTS, expert_column
from rlhf.ops.sample_values import (
    check_reward,
    greedy_reward,
    group_number,
    name_of,
    row_key,
    source_reward,
    states_of,
    step_rewards_of,
    temperature_of,
    turn_rewards,
    wrong_logprobs,
)
from rlhf.ops.spans import empty, masked, sums
from rlhf.types import Group, Image, Trajectory, Turn
from rlhf.types.images import joined_images

OBSERVATIONS = "observation_mask"


def assemble(
    groups: Sequence[Group],
    step_sources: Mapping[str, float] | None = None,
    scored: bool = True,
    rewards: Collection[str] = (),
    observations: bool = False,
    greedy: bool = False,
    key: Collection[str] | None = None,
    turns: bool = False,
) -> Batch | None:
    """Scored groups as a batch; None if no trajectory has a reward and a sampled token.

    Trajectories that failed, or that no reward source scored, are left out; the others of their group stay. The
    trajectories of each agent are a group of their own (:func:`rlhf.ops.sample_values.group_number`). A turn marked
    ``fresh`` starts a new sequence of the same unit. Tokens after the last sampled token of a sequence are left out,
    because nothing that is trained on depends on them.

    Args:
        step_sources: {reward source: weight} of the sources with ``credit = "step"``. Their ``RewardResult.steps``,
            times the weight, are placed at their (turn, token); ``Trajectory.reward`` must not contain them. With the
            key ``"env"``, ``Turn.reward`` is placed at the last token of its turn. The reward of a turn without tokens
            is placed at the last token that the policy sampled before it, or dropped if there is none. The steps of all
            other sources are already in ``Trajectory.reward``.
        rewards: reward sources that get their own column; ``env`` is the sum of the rewards of turns.
        observations: add the column ``observation_mask``. Tokens that stand for an image are not in it.
        greedy: whether there is a greedy answer to each prompt (:attr:`Needs.greedy`).
        key: columns of the data from which ``key`` is computed, with the source; None: the batch has no such column.
        turns: add the columns ``turn``, ``turn_reward`` and ``state``.
        scored: False if rewards are not used (``Needs.reward = False``). Trajectories without a reward are then kept.

    Raises:
        TrainingError: a reward, log-prob or step is not a finite number, or a step is at a token that does not exist; a
            greedy answer or a column of ``key`` is missing; records of experts are of different models.
    """
    live = [t for g in groups for t in g.trajectories if t.status != "failed"]
    trajectories = [t for t in live if t.reward is not None or not scored]
    if not any(t.sampled_tokens for t in trajectories):
        return None
    # A column has a value for every sampled token: one turn without log-probs, such as a demonstration, leaves it out.
    with_logprobs = all(turn.logprobs is not None for t in trajectories for turn in t.turns if turn.sampled)
    layout = _Layout()
    for trajectory in trajectories:
        if scored:
            check_reward(trajectory)
        layout.add(trajectory, _sequences(trajectory), step_rewards_of(trajectory, step_sources or {}))
    lens_B, unit_B = torch.tensor(layout.lens), torch.tensor(layout.units)
    batch = Batch(layout.ids(), lens_B, unit_B, torch.zeros_like(unit_B), {}, {}, _unit_columns(trajectories, scored))
    for name in rewards:
        values = [source_reward(trajectory, name, name in (step_sources or {})) for trajectory in trajectories]
        batch.unit[f"reward.{name}"] = torch.tensor(values, dtype=torch.float64)
    if greedy:
        batch.unit["greedy"] = torch.tensor([greedy_reward(t) for t in trajectories], dtype=torch.float64)
    if key is not None:
        batch.unit["key"] = torch.tensor([row_key(t.row, key, t.agent) for t in trajectories])
    tok = layout.columns(with_logprobs)
    if turns:
        tok |= layout.turn_columns()
    tok["loss_mask"][batch.starts_B] = False  # nothing predicts the first token of a sequence
    end_B = torch.cumsum(lens_B, 0) - 1  # a sequence ends with its last action, if it has one
    action_B = tok["loss_mask"][end_B]
    last_U = torch.full((batch.units,), -1).scatter_reduce_(0, unit_B[action_B], end_B[action_B], "amax")
    tok["last_action"] = empty((batch.tokens,), torch.bool).zero_()
    tok["last_action"][last_U[last_U >= 0]] = True
    batch = replace(batch, tok=tok, images_B=layout.images())
    if observations:
        batch = batch.with_column("tok", OBSERVATIONS, layout.observations() & ~batch.image_N, over=None)
    return batch


def compress(batch: Batch, values_N: Tensor) -> tuple[Tensor, Tensor]:
    """Values of each unit's action tokens, in order: ([U, A] left-aligned, zero-padded; bool mask [U, A]).

    Args:
        values_N: on the CPU, without gradient, of a type that numpy has (no bfloat16).
    """
    mask_UA = _action_places(batch)
    values_UA = values_N.new_zeros(mask_UA.shape)
    values_UA.numpy()[mask_UA.numpy()] = masked(values_N, batch.tok["loss_mask"])  # both in the same order
    return values_UA, mask_UA


def expand(batch: Batch, values_UA: Tensor) -> Tensor:
    """The inverse of :func:`compress`: [U, A] back to [N], 0 at all other tokens."""
    values_N = values_UA.new_zeros(batch.tokens)
    values_N.numpy()[batch.tok["loss_mask"].numpy()] = masked(values_UA, _action_places(batch))
    return values_N


def _action_places(batch: Batch) -> Tensor:
    """bool [U, A]: True at the first n positions of each row, where n is the unit's number of action tokens."""
    count_U = sums(batch.tok["loss_mask"], torch.tensor(batch.tokens_per_unit(), dtype=torch.int64))
    return torch.arange(int(count_U.max()) if batch.units else 0) < count_U[:, None]


@dataclass(slots=True)
class _Layout:
    """The turns of a batch, in its order."""

    places: list[tuple[Trajectory, int]] = field(default_factory=list)
    """For each turn: (its trajectory, its number there)."""
    sequences: list[list[Turn]] = field(default_factory=list)
    """[B]: the turns of each sequence."""
    lens: list[int] = field(default_factory=list)
    """[B]: tokens of each sequence."""
    units: list[int] = field(default_factory=list)
    """[B]: unit of each sequence."""
    step_rewards: dict[int, float] = field(default_factory=dict)
    """{token of the batch: reward}."""
    tokens: int = 0

    @property
    def turns(self) -> list[Turn]:
        return [turn for turns in self.sequences for turn in turns]

    def add(
        self, trajectory: Trajectory, sequences: Sequence[Sequence[int]], steps: Mapping[tuple[int, int], float]
    ) -> None:
        """Add a unit with these sequences. A sequence is a list of turn numbers. ``steps``: {(turn, token): reward}."""
        unit = self.units[-1] + 1 if self.units else 0
        starts: dict[int, int] = {}
        for numbers in sequences:
            begin = self.tokens
            for number in numbers:
                starts[number] = self.tokens
                self.places.append((trajectory, number))
                self.tokens += len(trajectory.turns[number].ids)
            if self.tokens == begin:
                raise ValueError(f"{name_of(trajectory)}: a sequence of the turns {list(numbers)} has no token")
            self.sequences.append([trajectory.turns[number] for number in numbers])
            self.lens.append(self.tokens - begin)
            self.units.append(unit)
        for (number, token), reward in steps.items():
            self.step_rewards[starts[number] + token] = reward

    def ids(self) -> Tensor:
        """The token ids, int64 [N]."""
        ids_N = np.empty(self.tokens, np.int64)
        np.concatenate([np.asarray(turn.ids) for turn in self.turns], out=ids_N)
        return torch.from_numpy(ids_N)

    def images(self) -> tuple[tuple[Image, ...], ...]:
        """The images of each sequence; empty if no turn has an image."""
        if not any(turn.images for turn in self.turns):
            return ()
        return tuple(joined_images((len(turn.ids), turn.images) for turn in turns) for turns in self.sequences)

    def observations(self) -> Tensor:
        """bool [N]: tokens of turns that were not sampled, after a sampled turn of their sequence."""
        mask_N, offset = empty((self.tokens,), torch.bool).zero_(), 0
        for turns in self.sequences:
            sampled = False
            for turn in turns:
                if sampled and not turn.sampled:
                    mask_N[offset : offset + len(turn.ids)] = True
                sampled = sampled or turn.sampled
                offset += len(turn.ids)
        return mask_N

    def columns(self, with_logprobs: bool) -> dict[str, Tensor]:
        """The token columns, in the order of their names."""
        turns = self.turns
        counts_T = [len(turn.ids) for turn in turns]

        def per_token(values_T: list[bool] | list[float], dtype: type) -> Tensor:
            return torch.from_numpy(np.repeat(np.array(values_T, dtype), counts_T))

        step_reward_N = empty((self.tokens,), torch.float32).zero_()
        if self.step_rewards:
            step_reward_N[list(self.step_rewards)] = torch.tensor(list(self.step_rewards.values()), dtype=torch.float32)
        columns = {
            "loss_mask": per_token([turn.sampled for turn in turns], bool),
            "step_reward": step_reward_N,
            "temperature": per_token([temperature_of(t, t.turns[n]) for t, n in self.places], np.float32),
        }
        experts_NLK = self._experts()
        recorded = {} if experts_NLK is None else {EXPERTS: experts_NLK}
        logprobs = {"gen_logprobs": self._logprobs()} if with_logprobs else {}
        return {**recorded, **logprobs, **columns}

    def _experts(self) -> Tensor | None:
        try:
            return expert_column(self.turns)
        except ValueError as cause:
            raise TrainingError(f"a batch: {cause}") from cause

    def turn_columns(self) -> dict[str, Tensor]:
        """``state``, ``turn`` and ``turn_reward``."""
        counts_T = [len(turn.ids) for turn in self.turns]
        # Keys are ids, because trajectories are mutable and not hashable.
        ends = {(id(t), n): end for (t, n), end in zip(self.places, accumulate(counts_T), strict=True)}
        reward_N = np.zeros(self.tokens)
        numbers: dict[tuple[int, str], int] = {}
        states: dict[tuple[int, int], int] = {}
        for trajectory in {id(t): t for t, _ in self.places}.values():
            for n, state in states_of(trajectory).items():
                group = group_number(trajectory.index[0], trajectory.agent)
                states[id(trajectory), n] = numbers.setdefault((group, state), len(numbers))
            for n, _, reward in turn_rewards(trajectory):
                reward_N[ends[id(trajectory), n] - 1] += reward
        turn_T = [n if t.turns[n].sampled else -1 for t, n in self.places]
        state_T = [states.get((id(t), n), -1) for t, n in self.places]
        columns = {"state": np.repeat(state_T, counts_T), "turn": np.repeat(turn_T, counts_T), "turn_reward": reward_N}
        return {name: torch.from_numpy(values_N) for name, values_N in columns.items()}

    def _logprobs(self) -> Tensor:
        """float32 [N]: as the generator reported, 0 at tokens that were not sampled."""
        longest = max(len(turn.ids) for turn in self.turns)
        zeros, parts = np.zeros(longest, np.float32), []
        for trajectory, number in self.places:
            turn = trajectory.turns[number]
            if turn.sampled and len(turn.logprobs or ()) != len(turn.ids):
                raise wrong_logprobs(trajectory, number)
            parts.append(np.asarray(turn.logprobs) if turn.sampled and turn.logprobs else zeros[: len(turn.ids)])
        values_N = torch.from_numpy(np.concatenate(parts))
        lowest, highest = values_N.aminmax()  # NaN if one of them is
        if not (lowest.isfinite() and highest.isfinite()):
            wrong = ((t, n) for t, n in self.places if not all(map(math.isfinite, t.turns[n].logprobs or ())))
            raise wrong_logprobs(*next(wrong))
        return values_N


def _unit_columns(trajectories: Sequence[Trajectory], scored: bool) -> dict[str, Tensor]:
    """The columns per unit, in the order of their names."""
    rewards = [t.reward for t in trajectories]
    scores = [t.reward if t.score is None else t.score for t in trajectories]
    columns = {
        "is_demonstration": torch.tensor([t.is_demonstration for t in trajectories]),
        "group": torch.tensor([group_number(t.index[0], t.agent) for t in trajectories]),
        "own_tokens": torch.tensor([t.sampled_tokens for t in trajectories]),
        "reward": torch.tensor(rewards, dtype=torch.float64) if scored else None,
        "sample": torch.tensor([t.index[1] for t in trajectories]),
        "score": torch.tensor(scores, dtype=torch.float64) if scored else None,
        "truncated": torch.tensor([t.truncated for t in trajectories]),
    }
    return {name: values_U for name, values_U in columns.items() if values_U is not None}


def _sequences(trajectory: Trajectory) -> list[list[int]]:
    """The turn numbers of each sequence, up to its last sampled turn with tokens. If no turn was sampled, the prompt
    represents the trajectory, because its reward counts in the baseline of its group."""
    contexts: list[list[int]] = []
    for number, turn in enumerate(trajectory.turns):
        if turn.fresh or not contexts:
            if turn.sampled:
                raise TrainingError(
                    f"{name_of(trajectory)}: turn {number} starts a sequence but was sampled; a sequence starts with "
                    "the context that the policy saw"
                )
            contexts.append([])
        contexts[-1].append(number)
    taught = []
    for numbers in contexts:
        sampled = [i for i, n in enumerate(numbers) if trajectory.turns[n].sampled and trajectory.turns[n].ids]
        if sampled:
            taught.append(numbers[: sampled[-1] + 1])
    # The first turn has a token: the run refuses samples that do not start with a prompt.
    return taught or [contexts[0][:1]]
