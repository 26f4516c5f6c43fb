"""The conformance suites, where they ask for nothing that needs a model."""

from __future__ import annotations

from typing import Any

from rlhf.types import GenerationRequest, Sampling, Turn
from rlhf_plugin_simulated import SimulatedBackend
from rlhf_plugin_simulated.env import SimulatedEnv
from rlhf_plugin_simulated.generator import SimulatedGenerator
from rlhf_plugin_simulated.launcher import SimulatedLauncher
from rlhf_plugin_simulated.trainer import SimulatedTrainer
from rlhf_testing.backend import BackendContract
from rlhf_testing.env import EnvContract
from rlhf_testing.generator import GeneratorContract, Sampled
from rlhf_testing.launcher import LauncherContract
from rlhf_testing.trainer import TrainerContract

FAST = 1e6
"""Simulated seconds per second."""


class TestSimulatedBackend(BackendContract):
    backend = SimulatedBackend


class TestSimulatedLauncher(LauncherContract):
    launcher = SimulatedLauncher


class TestSimulatedEnv(EnvContract):
    env = SimulatedEnv
    configs = (
        SimulatedEnv.Config(speed=FAST),
        SimulatedEnv.Config(turns=1, delay_sigma=0.0, slow_share=0.5, speed=FAST),
    )


class TestSimulatedTrainer(TrainerContract):
    trainer = SimulatedTrainer
    configs = (SimulatedTrainer.Config(speed=FAST),)
    test_forward = test_gradients = test_every_parameter_learns = None  # outputs and gradients are zero
    test_evaluates_without_dropout = None  # as is the loss
    test_skipped_step = test_skip_updates = None  # a loss that is not computed is never infinite
    test_frozen_head = None  # the model's files are not read
    test_weights = test_export = None  # the only weight is the number of steps


class TestSimulatedGenerator(GeneratorContract):
    generator = SimulatedGenerator
    configs = (
        SimulatedGenerator.Config(speed=FAST),
        SimulatedGenerator.Config(engines=2, slots=1, tokens_sigma=0.0, deaths=0.5, load_seconds=1.0, speed=FAST),
    )
    test_distribution = test_greedy = None  # tokens are random at every temperature
    test_stops = None  # nothing but its length ends an answer

    def make(self, config: Any, **options: Any) -> Sampled:
        """The text of an answer is the number of its tokens."""
        sampled = super().make(config, **options)
        sampled.decode = lambda ids: str(len(ids))
        return sampled

    def _same_logprobs(
        self, s: Sampled, sampling: Sampling, about: str, keep: object = None
    ) -> list[tuple[GenerationRequest, Turn]]:
        """There is no model to compare with: log-probs are -1."""
        requests = self.requests(sampling)
        turns = s.turns(requests, about)
        for turn in turns:
            assert list(turn.logprobs or ()) == [-1.0] * len(turn.ids)
        return list(zip(requests, turns, strict=True))
