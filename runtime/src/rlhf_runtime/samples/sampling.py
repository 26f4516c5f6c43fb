"""The objects that draw and score samples, and the sampling parameters of the run file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlhf.errors import RolloutError
from rlhf.interfaces import ComponentConfig, Generator, GeneratorSpec
from rlhf.types import GenerationRequest, Needs, Sampling, Turn

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.models.shared_devices import Phases
from rlhf_runtime.models.weight_sync import HOLDS_NOTHING, WeightSync
from rlhf_runtime.samples.failures import Failures
from rlhf_runtime.samples.rollout_settings import TRAINING, RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts


@dataclass(frozen=True)
class Sampler:
    """Generates answers to rows with the newest weights of the policy, and scores the answers."""

    rollouts: Rollouts
    weights: WeightSync
    """Sends the policy's weights to the generator."""
    phases: Phases
    """Decides whether the generator or the roles use the devices that they share."""


class NoGenerator(Generator):
    """The generator of a run whose rollout generates nothing (``Rollout.needs_generator`` is false). It has a version
    but no weights."""

    name = "none"
    capabilities = frozenset({HOLDS_NOTHING})

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config = ComponentConfig()

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        raise RolloutError("the rollout asked for tokens, but it declares needs_generator = False; set it to True")


def training_sampling(config: RunFile) -> Sampling:
    """Sampling parameters of training, from ``[sampling]``."""
    s = config.sampling
    return Sampling(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p, (), s.stop, s.ignore_eos)


def evaluation_sampling(config: RunFile) -> Sampling:
    """Sampling parameters of evaluation, from ``[eval]``. Stop strings are from ``[sampling]``, and so is the default
    of the token budget."""
    budget = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return Sampling(budget, config.eval.temperature, stop=config.sampling.stop)


def training_settings(config: RunFile, failures: Failures, needs: Needs) -> RolloutSettings:
    """Settings of training rollouts, from ``[sampling]`` and ``[stream]``, and the algorithm's needs."""
    return RolloutSettings(
        sampling=training_sampling(config),
        samples=config.sampling.samples_per_prompt,
        purpose=TRAINING,
        seed=config.run.seed,
        max_tokens=config.data.max_tokens,
        deadline=config.stream.rollout_deadline,
        abort_on_failure=config.stream.on_failed_sample == "abort",
        demonstration_share=needs.demonstration_share,
        demonstration_sources=needs.demonstration_sources,
        failures=failures,
        max_images=config.data.image_limit,
        greedy=needs.greedy,
        demonstrations_per_group=needs.demonstrations_per_group,
    )


def evaluation_settings(config: RunFile, failures: Failures) -> RolloutSettings:
    """Settings of evaluation rollouts, from ``[eval]`` (see :func:`evaluation_sampling`)."""
    return RolloutSettings(
        sampling=evaluation_sampling(config),
        samples=config.eval.samples,
        purpose="eval",
        seed=config.run.seed,
        max_tokens=config.data.max_tokens,
        deadline=config.stream.rollout_deadline,
        abort_on_failure=False,
        failures=failures,
        max_images=config.data.image_limit,
    )


def training_failures(config: RunFile, note: Callable[[str], None]) -> Failures:
    """A counter of failed training samples. ``note`` receives a message about the first failure."""
    policy = config.stream.on_failed_sample
    effect = f'leaves {"its group" if policy == "drop_group" else "the batch"} (stream.on_failed_sample = "{policy}")'
    return Failures(config.stream.max_failed, note, effect=effect)


def evaluation_failures(config: RunFile, note: Callable[[str], None]) -> Failures:
    """A counter of failed evaluation samples. ``note`` receives a message about the first failure."""
    return Failures(config.stream.max_failed, note, "evaluation sample", "has no reward", "eval/failed")
