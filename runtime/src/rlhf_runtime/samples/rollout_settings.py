"""Settings of a batch of rollouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf.seeds import derive_seed
from rlhf.types import Sampling

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
