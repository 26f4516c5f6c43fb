"""What rewards and environments return, checked; and as JSON, in which it leaves a worker process."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rlhf.checkpoint.json_values import encode
from rlhf.errors import CheckpointError
from rlhf.types import EnvStep, RewardResult, Sampling, Trajectory


class InvalidResult(Exception):
    """A plugin returned something that its interface does not allow."""


def check_results(results: object, trajectories: Sequence[Trajectory]) -> list[RewardResult | str]:
    """One checked result per trajectory, or the text of what is wrong with it. Raises where the list itself is wrong:
    a shorter or longer one is never broadcast or cut."""
    if not isinstance(results, list | tuple):
        raise InvalidResult(f"returned {_describe(results)}; allowed: a list with one RewardResult per trajectory")
    if len(results) != len(trajectories):
        raise InvalidResult(
            f"returned {len(results)} results for {len(trajectories)} trajectories; allowed: exactly one each, in order"
        )
    return [_check_result(r, t) for r, t in zip(results, trajectories, strict=True)]


def check_step(step: object) -> EnvStep:
    """What an environment's ``step`` returned, if it is allowed."""
    if not isinstance(step, EnvStep):
        raise InvalidResult(f"returned {_describe(step)}; allowed: an EnvStep")
    if not isinstance(step.observation, str):
        raise InvalidResult(f"returned EnvStep(observation={_describe(step.observation)}); allowed: text")
    reward = _number("EnvStep(reward=", step.reward)
    if not isinstance(step.done, bool):
        raise InvalidResult(f"returned EnvStep(done={_describe(step.done)}); allowed: True or False")
    if step.sampling is not None and not isinstance(step.sampling, Sampling):
        raise InvalidResult(f"returned EnvStep(sampling={_describe(step.sampling)}); allowed: a Sampling or None")
    return EnvStep(step.observation, reward, step.done, step.sampling, dict(step.info))


def check_observation(text: object) -> str:
    """What an environment's ``reset`` returned, if it is allowed."""
    if not isinstance(text, str):
        raise InvalidResult(f'returned {_describe(text)}; allowed: text, "" for nothing')
    return text


def results_to_json(results: Sequence[RewardResult | str]) -> list[Any]:
    return [r if isinstance(r, str) else asdict(r) for r in results]


def results_from_json(values: Sequence[Any]) -> list[RewardResult | str]:
    def result(v: Any) -> RewardResult | str:
        if isinstance(v, str):
            return v
        return RewardResult(v["value"], v["score"], tuple((a, b, c) for a, b, c in v["steps"]), v["info"])

    return [result(v) for v in values]


def step_to_json(step: EnvStep) -> dict[str, Any]:
    return asdict(step)


def step_from_json(value: Mapping[str, Any]) -> EnvStep:
    sampling = value["sampling"]
    if sampling is not None:
        sampling = Sampling(
            **{
                **sampling,
                "stop_token_ids": tuple(sampling["stop_token_ids"]),
                "stop": tuple(sampling["stop"]),
            }
        )
    return EnvStep(value["observation"], value["reward"], value["done"], sampling, value["info"])


def _check_result(result: object, trajectory: Trajectory) -> RewardResult | str:
    try:
        if not isinstance(result, RewardResult):
            raise InvalidResult(f"returned {_describe(result)}; allowed: a RewardResult")
        value = None if result.value is None else _number("RewardResult(value=", result.value)
        score = None if result.score is None else _number("RewardResult(score=", result.score)
        steps = tuple(_check_step_reward(s, trajectory) for s in result.steps)
        if not isinstance(result.info, dict):
            raise InvalidResult(f"returned RewardResult(info={_describe(result.info)}); allowed: a dict")
        encode(result.info, "info", nonfinite="mark")  # written once the step is learnt: what cannot be, fails now
        return RewardResult(value, score, steps, result.info)
    except InvalidResult as error:
        return str(error)
    except CheckpointError as error:
        return f"returned a RewardResult whose {error}"


def _check_step_reward(step: object, trajectory: Trajectory) -> tuple[int, int, float]:
    if not (isinstance(step, tuple | list) and len(step) == 3 and all(type(i) is int for i in step[:2])):
        raise InvalidResult(f"returned the step reward {_describe(step)}; allowed: (turn, token in turn, value)")
    turn, token, value = step
    if not 0 <= turn < len(trajectory.turns) or not trajectory.turns[turn].sampled:
        allowed = [i for i, t in enumerate(trajectory.turns) if t.sampled]
        raise InvalidResult(f"returned a step reward for turn {turn}; allowed: the sampled turns {allowed}")
    if not 0 <= token < len(trajectory.turns[turn].ids):
        size = len(trajectory.turns[turn].ids)
        raise InvalidResult(f"returned a step reward for token {token} of turn {turn}, which has {size} tokens")
    return turn, token, _number("a step reward with value (", value)


def _number(what: str, value: object) -> float:
    """A finite float. A bool or a tensor is refused: what the author meant is not ours to guess."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        hint = " (write float(...))" if isinstance(value, bool) else ""
        hint = " (write .item())" if hasattr(value, "item") else hint
        raise InvalidResult(f"returned {what}{_describe(value)}); allowed: a finite number{hint}")
    if not math.isfinite(value):
        raise InvalidResult(f"returned {what}{value}); allowed: a finite number")
    return float(value)


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
