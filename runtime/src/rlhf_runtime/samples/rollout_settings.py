"""Settings of rollouts, from the run file and the needs of its algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlhf.seeds import derive_seed
from rlhf.types import Needs, Sampling

from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.samples.failures import Failures

TRAINING = "sample"
"""The purpose of samples that are trained on."""


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings of a batch of rollouts. Training and evaluation have one object each."""

    sampling: Sampling
    samples: int
    purpose: str
    """Part of every seed: :data:`TRAINING`, or ``eval`` for evaluation."""
    seed: int
    max_tokens: int
    deadline: float
    """Seconds a sample may spend outside generation and the run's rewards."""
    abort_on_failure: bool = True
    demonstration_share: float = 0.0
    """Share of rows whose group is the answer in the data instead of samples (``Needs.demonstration_share``)."""
    demonstration_sources: tuple[str, ...] = ()
    """Sources whose groups are always the answer in the data (``Needs.demonstration_sources``)."""
    failures: Failures | None = None
    """Counts failed samples when a failure does not abort the run, and stops the run when too many fail."""
    max_images: int = 8
    """Largest number of images in a sequence."""
    greedy: bool = False
    """Whether each prompt also gets a greedy answer (``Needs.greedy``). It is the last answer of the group until the
    group is scored."""
    demonstrations_per_group: int = 0
    """Number of samples at the start of each group that are the answer in the data
    (``Needs.demonstrations_per_group``)."""

    @property
    def answers(self) -> int:
        """Number of answers to each prompt: its samples and the greedy answer."""
        return self.samples + self.greedy

    def sampling_of(self, sample: int) -> Sampling:
        """Sampling parameters of an answer, by its number in the group."""
        return greedy_sampling(self.sampling) if self.is_greedy(sample) else self.sampling

    def is_greedy(self, sample: int) -> bool:
        """Whether this is the greedy answer."""
        return self.greedy and sample == self.samples

    @property
    def has_demonstrations(self) -> bool:
        """Whether some groups contain answers of the data."""
        return self.demonstration_share > 0 or bool(self.demonstration_sources)

    def is_demonstration(self, number: int, source: str = "") -> bool:
        """Whether group ``number``, of a row of ``source``, is the answer of the data."""
        return source in self.demonstration_sources or (
            self.demonstration_share > 0
            # A seed is uniform from 0 to below 2**63.
            and derive_seed(self.seed, f"{self.purpose}/given", number) < self.demonstration_share * 2.0**63
        )


def greedy_sampling(sampling: Sampling) -> Sampling:
    """``sampling``, but always with the most likely token."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def training_sampling(config: RunFile) -> Sampling:
    """Sampling parameters of training, from ``[sampling]``."""
    s = config.sampling
    return Sampling(s.max_new_tokens, s.temperature, s.top_p, s.top_k, s.min_p, (), s.stop, s.ignore_eos)


def evaluation_sampling(config: RunFile) -> Sampling:
    """Sampling parameters of evaluation, from ``[eval]``. Stop strings are from ``[sampling]``, and so is the default
    of the token budget."""
    budget = config.eval.max_new_tokens or config.sampling.max_new_tokens
    return Sampling(budget, config.eval.temperature, stop=config.sampling.stop)


def training_settings(config: RunFile, needs: Needs, note: Callable[[str], None]) -> RolloutSettings:
    """Settings of training rollouts, from ``[sampling]`` and ``[stream]``, and the algorithm's needs. ``note`` receives
    a message about the first failed sample."""
    policy = config.stream.on_failed_sample
    effect = f'leaves {"its group" if policy == "drop_group" else "the batch"} (stream.on_failed_sample = "{policy}")'
    return RolloutSettings(
        sampling=training_sampling(config),
        samples=config.sampling.samples_per_prompt,
        purpose=TRAINING,
        seed=config.run.seed,
        max_tokens=config.data.max_tokens,
        deadline=config.stream.rollout_deadline,
        abort_on_failure=policy == "abort",
        demonstration_share=needs.demonstration_share,
        demonstration_sources=needs.demonstration_sources,
        failures=Failures(config.stream.max_failed, note, effect=effect),
        max_images=config.data.image_limit,
        greedy=needs.greedy,
        demonstrations_per_group=needs.demonstrations_per_group,
    )


def evaluation_settings(config: RunFile, note: Callable[[str], None]) -> RolloutSettings:
    """Settings of evaluation rollouts, from ``[eval]`` (see :func:`evaluation_sampling`). ``note``: as above."""
    return RolloutSettings(
        sampling=evaluation_sampling(config),
        samples=config.eval.samples,
        purpose="eval",
        seed=config.run.seed,
        max_tokens=config.data.max_tokens,
        deadline=config.stream.rollout_deadline,
        abort_on_failure=False,
        failures=Failures(config.stream.max_failed, note, "evaluation sample", "has no reward", "eval/failed"),
        max_images=config.data.image_limit,
    )
