"""Rewards, log-probs and temperatures of a sample, checked before they enter a batch. Errors name the sample."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping

from rlhf.errors import TrainingError
from rlhf.seeds import derive_seed
from rlhf.types import Row, Trajectory, Turn
from rlhf.types.needs import GREEDY_REWARD

ENV = "env"
"""Key of ``step_sources`` for the rewards that an environment gives to its turns."""


def name_of(trajectory: Trajectory) -> str:
    """Name of a sample in messages."""
    group, sample = trajectory.index
    agent = f" as {trajectory.agent!r}" if trajectory.agent else ""
    return f"sample {sample} of group {group}{agent} (row {trajectory.row.index} of {trajectory.row.source!r})"


def group_number(number: int, agent: str) -> int:
    """A group number for the trajectories of one agent in group ``number`` of the run. It differs between agents, so
    that no statistic of a group mixes agents. If the policy plays a single agent, it is ``number`` itself. The numbers
    of one agent have the order of the groups."""
    # A multiple of 2**31 from 2**31 to 2**62: above all numbers of groups, and the sum is an int64.
    return number + (((derive_seed(0, agent) >> 32) + 1) << 31 if agent else 0)


def check_reward(trajectory: Trajectory) -> None:
    """Raises TrainingError unless the reward, and the score if there is one, are finite numbers."""
    _finite(trajectory, "reward", float(trajectory.reward if trajectory.reward is not None else math.nan))
    if trajectory.score is not None:
        _finite(trajectory, "score", float(trajectory.score))


def source_reward(trajectory: Trajectory, source: str, steps_placed: bool = False) -> float:
    """A source's reward for a trajectory, including step rewards, before its weight; NaN if the source gave none.
    :data:`ENV`: the sum of the rewards of the turns.

    Args:
        steps_placed: leave out step rewards, which are placed at their tokens.
    """
    if source == ENV:
        turns = [turn.reward for turn in trajectory.turns if turn.sampled and turn.reward is not None]
        return math.fsum(turns) if turns else math.nan
    result = trajectory.rewards.get(source)
    value = None if result is None else result.value if steps_placed else result.total
    return math.nan if value is None else float(value)


def greedy_reward(trajectory: Trajectory) -> float:
    """The reward of the greedy answer to the same prompt. Raises TrainingError if there is no greedy answer."""
    if GREEDY_REWARD not in trajectory.info:
        raise TrainingError(
            f"{name_of(trajectory)} has no {GREEDY_REWARD!r} in its info: no greedy answer to its prompt was drawn. "
            "The algorithm must declare that it needs one: Needs(greedy=True)"
        )
    return _finite(trajectory, GREEDY_REWARD, float(trajectory.info[GREEDY_REWARD]))


def row_key(row: Row, columns: Collection[str], agent: str = "") -> int:
    """63-bit key, equal in every process for the same source, the same values in ``columns`` and the same agent. Raises
    TrainingError if the row lacks a column."""
    if missing := [name for name in columns if name not in row.columns]:
        raise TrainingError(
            f"row {row.index} of {row.source!r} has no column {missing[0]!r}, which the advantage reads; columns "
            f"present: {', '.join(map(str, row.columns))}"
        )
    values = (row.source, [(name, row[name]) for name in columns])
    return derive_seed(0, repr((*values, agent) if agent else values))


def states_of(trajectory: Trajectory) -> dict[int, str]:
    """{number of a sampled turn: the observation before it}. The observation is the text of the turns since the
    previous sampled turn (their tokens, if they have no text), and their images."""
    states, texts = dict[int, str](), list[str]()
    for number, turn in enumerate(trajectory.turns):
        if turn.sampled:
            # repr() keeps the boundaries of the turns: ['ab', 'c'] and ['a', 'bc'] are different observations.
            states[number] = repr(texts)
            texts = []
        else:
            texts.append(turn.text or repr(turn.ids.tolist()))
            texts += [hashlib.sha256(image.data).hexdigest() for image in turn.images]
    return states


def wrong_logprobs(trajectory: Trajectory, number: int) -> TrainingError:
    """The error for turn ``number``, whose log-probs are too few, too many or not finite."""
    turn = trajectory.turns[number]
    values = turn.logprobs or ()
    return TrainingError(
        f"{name_of(trajectory)}: turn {number} needs {len(turn.ids)} finite log-probs from the generator, "
        f"got {len(values)}, of which {sum(map(math.isfinite, values))} finite"
    )


def temperature_of(trajectory: Trajectory, turn: Turn) -> float:
    """The temperature at which a turn was sampled, 1 for other turns. Raises TrainingError for 0."""
    if not turn.sampled:
        return 1.0
    if not turn.temperature > 0:
        raise TrainingError(
            f"{name_of(trajectory)} was sampled at temperature {turn.temperature}: training needs a temperature above "
            "0, because log-probs are of the distribution that tokens are sampled from"
        )
    return float(turn.temperature)


def step_rewards_of(trajectory: Trajectory, step_sources: Mapping[str, float]) -> dict[tuple[int, int], float]:
    """{(turn, token): weighted sum of the step rewards there}, as :func:`rlhf.ops.trajectories.assemble` says."""
    rewards: dict[tuple[int, int], float] = {}
    for source, weight in step_sources.items():
        if source == ENV:
            steps = turn_rewards(trajectory)
        else:
            steps = trajectory.rewards[source].steps if source in trajectory.rewards else ()
        for number, token, value in steps:
            turn = trajectory.turns[number] if 0 <= number < len(trajectory.turns) else None
            if turn is None or not turn.sampled or not 0 <= token < len(turn.ids):
                problem = "no such turn" if turn is None else f"{len(turn.ids)} tokens, sampled = {turn.sampled}"
                raise TrainingError(
                    f"{name_of(trajectory)}: reward source {source!r} rewards token {token} of turn {number} "
                    f"({problem}); a step reward belongs to a token that the policy sampled"
                )
            value = _finite(trajectory, f"step reward of {source!r}", float(value))
            rewards[number, token] = rewards.get((number, token), 0.0) + weight * value
    return rewards


def turn_rewards(trajectory: Trajectory) -> tuple[tuple[int, int, float], ...]:
    """(turn, token, reward) of each reward from the environment."""
    rewards, last = [], None
    for number, turn in enumerate(trajectory.turns):
        if turn.sampled and turn.ids:
            last = (number, len(turn.ids) - 1)
        if turn.sampled and turn.reward is not None and last is not None:
            rewards.append((*last, float(turn.reward)))
    return tuple(rewards)


def _finite(trajectory: Trajectory, label: str, value: float) -> float:
    if not math.isfinite(value):
        raise TrainingError(f"{name_of(trajectory)}: its {label} is {value}; it must be a finite number")
    return value
