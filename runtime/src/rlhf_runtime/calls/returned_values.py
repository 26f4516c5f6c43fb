"""Checks the return values of rewards, environments and rollouts, and reads those of worker processes."""

from __future__ import annotations

import math
import numbers
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.errors import CheckpointError, brief
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.env import Env
from rlhf.types import EnvStep, ExpertLayers, RewardResult, Sampling, Trajectory, Turn

from rlhf_runtime.checkpoint.json_values import encode


class InvalidResult(Exception):
    """A plugin returned something that its interface does not allow."""


def agents_of(environment: type[Env], config: ComponentConfig | None) -> tuple[str, ...]:
    """The agents that the policy plays. Raises InvalidResult if :meth:`Env.agents` returned something else."""
    names = environment.agents(environment.Config() if config is None else config)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
        raise InvalidResult(f"returned {brief(names)}; allowed: a tuple of names, empty for one agent")
    if len({*names}) < len(names):
        raise InvalidResult(f"returned {brief(names)}; allowed: distinct names")
    return tuple(names)


def check_results(
    results: object, trajectories: Sequence[Trajectory], after: Sequence[Trajectory] | None = None
) -> list[RewardResult | str]:
    """One checked result per trajectory, or a text that says what is wrong with the result. Raises InvalidResult if the
    list itself is wrong. A shorter or longer list is never broadcast or truncated.

    Args:
        after: ``Group.trajectories`` of the reward's own copy of the group, after the call.
    """
    if after is not None and [*map(id, after)] != [*map(id, trajectories)]:
        raise InvalidResult(
            "changed group.trajectories, so that it is not clear which trajectory each result is for; allowed: results "
            "in the order of the call. Sort or filter a copy, such as sorted(group.trajectories, key=...)"
        )
    if not isinstance(results, list | tuple):
        raise InvalidResult(f"returned {brief(results)}; allowed: a list with one RewardResult per trajectory")
    if len(results) != len(trajectories):
        raise InvalidResult(
            f"returned {len(results)} results for {len(trajectories)} trajectories; allowed: exactly one per "
            "trajectory, in order"
        )
    return [_check_result(r, t) for r, t in zip(results, trajectories, strict=True)]


def check_step(step: object, agents: Sequence[str] = ()) -> EnvStep:
    """Returns the result of an environment's ``step``. Raises InvalidResult if it is not valid.

    Args:
        agents: agents that the policy plays (:meth:`rlhf.interfaces.Env.agents`).
    """
    if not isinstance(step, EnvStep):
        raise InvalidResult(f"returned {brief(step)}; allowed: an EnvStep")
    if not isinstance(step.observation, str):
        raise InvalidResult(f"returned EnvStep(observation={brief(step.observation)}); allowed: text")
    reward = _number("EnvStep(reward=", step.reward)
    if not isinstance(step.done, bool):
        raise InvalidResult(f"returned EnvStep(done={brief(step.done)}); allowed: True or False")
    if step.sampling is not None and not isinstance(step.sampling, Sampling):
        raise InvalidResult(f"returned EnvStep(sampling={brief(step.sampling)}); allowed: a Sampling or None")
    _check_info("EnvStep", step.info)
    images = step.images
    if not isinstance(images, list | tuple) or not all(isinstance(i, bytes) for i in images):
        raise InvalidResult(f"returned EnvStep(images={brief(images)}); allowed: contents of image files, bytes")
    score = None if step.score is None else _number("EnvStep(score=", step.score)
    if not isinstance(step.rewards, Mapping):
        raise InvalidResult(f"returned EnvStep(rewards={brief(step.rewards)}); allowed: {{agent: reward}}")
    names: list[object] = [*step.rewards, *([] if step.done or (step.agent == "" and not agents) else [step.agent])]
    if strangers := [name for name in names if name not in agents]:
        raise InvalidResult(f"returned an EnvStep that names the agent {brief(strangers[0])}; {_allowed(agents)}")
    rewards = {agent: _number(f"EnvStep(rewards={{{agent!r}: ", value) for agent, value in step.rewards.items()}
    fields = step.observation, reward, step.done, step.sampling, dict(step.info), tuple(images), score
    return EnvStep(*fields, step.agent, rewards)


def check_opening(opening: object, agents: Sequence[str] = ()) -> str | EnvStep:
    """Returns the result of an environment's ``reset``. Raises InvalidResult if it is not valid.

    Args:
        agents: agents that the policy plays (:meth:`rlhf.interfaces.Env.agents`).
    """
    if not agents:
        if isinstance(opening, str):
            return opening
        raise InvalidResult(f'returned {brief(opening)}; allowed: text, "" for nothing')
    if isinstance(opening, EnvStep):
        step = check_step(opening, agents)
        if step == EnvStep(step.observation, sampling=step.sampling, agent=step.agent):
            return step
    raise InvalidResult(
        f"returned {brief(opening)}; allowed with several agents: EnvStep(observation, agent=...), optionally with "
        "sampling"
    )


def _allowed(agents: Sequence[str]) -> str:
    return f"allowed: {', '.join(map(repr, agents))}" if agents else "Env.agents() names no agents"


def check_turns(
    turns: object, experts: ExpertLayers | None = None, agents: Sequence[str] = (), vocabulary: int | None = None
) -> list[list[Turn]]:
    """Returns the result of a rollout's ``run`` as a list of turns for each agent, in the order of ``agents``. Raises
    InvalidResult if it is not valid.

    Args:
        experts: expert layers of the policy, if recorded experts are replayed.
        agents: agents that the policy plays in the environment of the run (:meth:`rlhf.interfaces.Env.agents`).
        vocabulary: size of the policy's vocabulary in tokens; None: not known.
    """
    if not isinstance(turns, list | tuple):
        raise InvalidResult(f"returned {brief(turns)}; allowed: a list of turns")
    for number, turn in enumerate(turns):
        _check_turn(f"turn {number}", turn, vocabulary)
    conversations: dict[str, list[Turn]] = {agent: [] for agent in agents or ("",)}
    for number, turn in enumerate(turns):
        if turn.agent not in conversations:
            raise InvalidResult(f"returned turn {number} of the agent {brief(turn.agent)}; {_allowed(agents)}")
        conversations[turn.agent].append(turn)
    played = [conversation for conversation in conversations.values() if conversation] or [[]]
    for conversation in played:
        _check_conversation(conversation, experts)
    return played


def _check_conversation(turns: Sequence[Turn], experts: ExpertLayers | None) -> None:
    label = f" of {turns[0].agent!r}" if turns and turns[0].agent else ""
    if not turns or turns[0].sampled or not turns[0].ids:
        raise InvalidResult(f"must return turns{label} that start with a prompt of at least one token")
    if not any(t.sampled for t in turns):
        raise InvalidResult(f"returned no sampled turn{label}: there is nothing to learn from")
    if any(turn.experts is not None for turn in turns):
        from rlhf.ops.experts import check_records  # a worker process under another Python has no torch

        try:
            check_records(turns, experts)
        except ValueError as cause:
            raise InvalidResult(f"returned a record that cannot be used: {cause}") from None


def results_from_json(values: object, trajectories: Sequence[Trajectory]) -> list[RewardResult | str]:
    """The results in the answer of a worker process. They are checked again, because a worker runs third-party code."""
    if not isinstance(values, list):
        raise InvalidResult(f"received {brief(values)} from its worker process; allowed: a list")
    results: list[object] = []
    for value in values:
        try:
            results.append(value if isinstance(value, str) else RewardResult(**value))
        except TypeError:
            raise InvalidResult(
                f"received {brief(value)} from its worker process; allowed: value, score, steps and info"
            ) from None
    if len(results) != len(trajectories):
        return check_results(results, trajectories)
    return [v if isinstance(v, str) else _check_result(v, t) for v, t in zip(results, trajectories, strict=True)]


def opening_from_json(value: object, agents: Sequence[str] = ()) -> str | EnvStep:
    """The beginning of an episode in the answer of a worker process, checked again."""
    return check_opening(step_from_json(value, agents) if isinstance(value, dict) else value, agents)


def step_from_json(value: object, agents: Sequence[str] = ()) -> EnvStep:
    """The EnvStep in the answer of a worker process, checked as in :func:`results_from_json`."""
    try:
        fields: dict[str, Any] = dict(value)  # type: ignore[call-overload]
        if (sampling := fields.get("sampling")) is not None:
            tuples = {name: tuple(sampling[name]) for name in ("stop_token_ids", "stop")}
            fields["sampling"] = Sampling(**{**sampling, **tuples})
        fields["images"] = tuple(b64decode(image) for image in fields.get("images", ()))
        step = EnvStep(**fields)
    except (TypeError, ValueError, KeyError):
        raise InvalidResult(
            f"received {brief(value)} from its worker process; allowed: observation, reward, done, sampling, info, "
            "images, score, agent, rewards"
        ) from None
    return check_step(step, agents)


def _check_result(result: object, trajectory: Trajectory) -> RewardResult | str:
    try:
        if not isinstance(result, RewardResult):
            raise InvalidResult(f"returned {brief(result)}; allowed: a RewardResult")
        value = None if result.value is None else _number("RewardResult(value=", result.value)
        score = None if result.score is None else _number("RewardResult(score=", result.score)
        if not isinstance(result.steps, list | tuple):
            raise InvalidResult(f"returned RewardResult(steps={brief(result.steps)}); allowed: a tuple of step rewards")
        steps = tuple(_check_step_reward(s, trajectory) for s in result.steps)
        _check_info("RewardResult", result.info)
        return RewardResult(value, score, steps, result.info)
    except InvalidResult as error:
        return str(error)


def _check_step_reward(step: object, trajectory: Trajectory) -> tuple[int, int, float]:
    if not (isinstance(step, tuple | list) and len(step) == 3 and all(map(_is_integer, step[:2]))):
        raise InvalidResult(
            f"returned the step reward {brief(step)}; allowed: (turn, token in turn, value), the first two as integers"
        )
    turn, token, value = int(step[0]), int(step[1]), step[2]
    if not 0 <= turn < len(trajectory.turns) or not trajectory.turns[turn].sampled:
        allowed = [i for i, t in enumerate(trajectory.turns) if t.sampled]
        raise InvalidResult(f"returned a step reward for turn {turn}; allowed: the sampled turns {allowed}")
    if not 0 <= token < len(trajectory.turns[turn].ids):
        size = len(trajectory.turns[turn].ids)
        raise InvalidResult(f"returned a step reward for token {token} of turn {turn}, which has {size} tokens")
    return turn, token, _number("a step reward with value (", value)


def _check_turn(label: str, turn: object, vocabulary: int | None) -> None:
    if not isinstance(turn, Turn):
        raise InvalidResult(f"returned {brief(turn)} as {label}; allowed: a Turn")
    import numpy as np  # a worker process under another Python has no numpy, and checks no turns

    ids = np.frombuffer(turn.ids or b"", "i")
    if len(unknown := ids[(ids < 0) | (ids >= (vocabulary or math.inf))]):
        allowed = "integers >= 0" if vocabulary is None else f"0 to {vocabulary - 1}, the tokens of the model"
        raise InvalidResult(f"returned {label} with the token {unknown[0]}; allowed: {allowed}")
    if turn.is_demonstration:
        raise InvalidResult(
            f"returned {label} marked as a demonstration; the run itself replaces samples with answers of the data, if "
            "an algorithm asks for them (Needs.demonstrations_per_group)"
        )
    if turn.sampled and (turn.logprobs is None or len(turn.logprobs) != len(turn.ids)):
        count = "none" if turn.logprobs is None else str(len(turn.logprobs))
        raise InvalidResult(f"returned sampled {label} with {len(turn.ids)} tokens and {count} log-probs")
    for name, value in (("reward", turn.reward), ("score", turn.score)):
        if value is None:
            continue
        if not turn.sampled:
            raise InvalidResult(
                f"returned {label} (sampled = {turn.sampled}) with the {name} {brief(value)}; a {name} belongs to the "
                "turn that earned it, which the policy must have sampled"
            )
        _number(f"{label} with the {name} (", value)


def _check_info(label: str, info: object) -> None:
    """Raises InvalidResult if ``info`` cannot be written as JSON or its numbers cannot be averaged. Both
    happen after the training step, which is too late for an error."""
    if not isinstance(info, dict):
        raise InvalidResult(f"returned {label}(info={brief(info)}); allowed: a dict")
    try:
        encode(info, "info", nonfinite="mark")
    except CheckpointError as error:
        raise InvalidResult(f"returned {label}(info=...) whose {error}") from None
    for value in _leaves(info):
        if isinstance(value, int) and not _is_finite(value):
            raise InvalidResult(f"returned {label}(info=...) with {brief(value)}; allowed: integers below 1.8e308")


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def _number(label: str, value: object) -> float:
    """A finite float. A bool or a tensor is refused, because its intended meaning is unclear."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = " (write float(...))" if isinstance(value, bool) else ""
        hint = " (write .item())" if hasattr(value, "item") else hint
        raise InvalidResult(f"returned {label}{brief(value)}); allowed: a finite number{hint}")
    if not _is_finite(value):
        text = value if isinstance(value, float) else brief(value)
        raise InvalidResult(f"returned {label}{text}); allowed: a finite number")
    return float(value)


def _is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, also of another library such as numpy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_finite(value: numbers.Real | int) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False
