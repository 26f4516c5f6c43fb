"""The simulated trainer counts steps, and the environment takes the time it is told. On a clock that the tests set."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from pathlib import Path

import pytest
import torch
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import ModelSpec, Place
from rlhf.types import EnvStep, RoleSpec, Row
from rlhf_plugin_simulated.delays import log_normal
from rlhf_plugin_simulated.env import SimulatedEnv
from rlhf_plugin_simulated.launcher import SimulatedLauncher
from rlhf_plugin_simulated.trainer import SimulatedTrainer

SPEC = ModelSpec(RoleSpec("policy", trained=True), "")


def make(**options: float) -> SimulatedTrainer:
    return SimulatedTrainer(SimulatedTrainer.Config(**options), SPEC)


def weights_of(trainer: SimulatedTrainer) -> dict[str, torch.Tensor]:
    return dict(trainer.weights())


# --------------------------------------------------------------------------------------- trainer


def test_weights_count_the_steps(clock) -> None:
    trainer = make()
    for steps in range(3):
        assert weights_of(trainer) == {"steps": torch.tensor([float(steps)])}
        trainer.accumulate([], None, {}, {})
        assert trainer.apply().grad_norm == 1.0
    other = make()
    other.load_weights(iter(weights_of(trainer).items()))
    assert other.steps == 3


def test_a_step_takes_its_time(clock) -> None:
    trainer = make(seconds=6.0, speed=4.0)
    for _ in range(2):
        trainer.apply()
    assert clock.now == 3.0


def test_the_state_is_saved_and_restored(clock, tmp_path: Path) -> None:
    trainer = make()
    for _ in range(5):
        trainer.apply()
    trainer.save(tmp_path / "state")
    restored = make()
    restored.apply()
    restored.load(tmp_path / "state")
    assert weights_of(restored) == weights_of(trainer) == {"steps": torch.tensor([5.0])}
    trainer.export(tmp_path / "model")
    from_export = make()
    from_export.load(tmp_path / "model")
    assert from_export.steps == 5


def test_other_views_than_the_live_weights_are_refused(tmp_path: Path) -> None:
    trainer = make()
    for ask in (
        lambda: trainer.forward([], ["logprobs"], "ema"),
        lambda: dict(trainer.weights("ema")),
        lambda: trainer.export(tmp_path / "model", "ema"),
    ):
        with pytest.raises(CapabilityError, match="trainer 'simulated' has no view 'ema'"):
            ask()


# -------------------------------------------------------------------------------------- launcher


@pytest.mark.parametrize("place", [Place(2), Place(1, 2)])
def test_the_launcher_refuses_places_that_it_would_not_reserve(place: Place) -> None:
    with pytest.raises(ConfigError, match=r"\[placement\.policy\] asks for . ranks of . devices; launcher 'simulated'"):
        SimulatedLauncher.check(None, {"policy": place}, None, "auto")
    SimulatedLauncher.check(None, {"policy": Place()}, None, "auto")


# ------------------------------------------------------------------------------------------- env


def episode(clock, seed: int, **options: float) -> tuple[list[EnvStep], list[float]]:
    """The steps of an episode, and the time after each."""

    async def scenario() -> tuple[list[EnvStep], list[float]]:
        env = SimulatedEnv(SimulatedEnv.Config(**options))
        assert await env.reset(Row({}, "unit", 0), seed) == ""
        steps: list[EnvStep] = []
        ends: list[float] = []
        while not steps or not steps[-1].done:
            step = asyncio.create_task(env.step(str(len(steps))))
            while not step.done():
                await clock.pass_(0.25)
            steps.append(await step)
            ends.append(clock.now)
        return steps, ends

    clock.now = 0.0
    return asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_episode_has_so_many_steps_and_rewards_its_last_one(clock) -> None:
    rewards = set()
    for seed in range(20):
        steps, ends = episode(clock, seed, turns=3, delay=0.5, delay_sigma=0.0)
        assert ends == [0.5, 1.0, 1.5]
        assert [(step.observation, step.done) for step in steps] == [("more", False), ("more", False), ("", True)]
        assert [step.reward for step in steps[:2]] == [0.0, 0.0]
        rewards.add(steps[2].reward)
    assert rewards == {0.0, 1.0}


def test_slow_steps_take_their_own_time(clock) -> None:
    options = {"turns": 200, "delay": 0.5, "delay_sigma": 0.0, "slow": 4.0}
    _, ends = episode(clock, 0, slow_share=1.0, **options)
    assert ends[-1] == 200 * 4.0
    _, ends = episode(clock, 0, slow_share=0.1, speed=2.0, **options)
    took = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    assert set(took) == {0.25, 2.0}
    assert 5 < took.count(2.0) < 40, "of 200 steps a tenth, within six standard deviations"


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0])
def test_random_durations_have_their_mean_and_spread(sigma: float) -> None:
    draw = random.Random(0)
    durations = [log_normal(draw, 3.0, sigma) for _ in range(20_000)]
    assert min(durations) > 0
    # Standard error of the mean: 3 * sqrt(exp(sigma^2) - 1) / sqrt(20,000) = 0.028 at sigma 1; five of them.
    assert statistics.fmean(durations) == pytest.approx(3.0, abs=0.14)
    assert statistics.pstdev(math.log(x) for x in durations) == pytest.approx(sigma, abs=0.025)
