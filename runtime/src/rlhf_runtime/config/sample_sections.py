"""The sections of the run file on how answers are sampled, scored and collected: ``[sampling]``, ``[stream]``,
``[[reward]]`` and ``[env]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from rlhf.fields import PathText
from rlhf.interfaces.component import ComponentConfig

from rlhf_runtime.config.sections import Choice, Count, NameText, NotNegative, Positive, Share


class SamplingSection(ComponentConfig):
    samples_per_prompt: Count = 1
    """Answers drawn per prompt: the group size."""
    max_new_tokens: Count = 256
    """Largest number of tokens in a sampled turn."""
    temperature: Positive = 1.0
    """The logits are divided by it, in sampling and in training."""
    top_p: Share = 1.0
    """Draw only from the most likely tokens whose probabilities sum to this share; 1 = off. In training, ``top_p``,
    ``top_k`` and ``min_p`` are allowed only with an importance correction."""
    top_k: NotNegative = 0
    """Draw only from this number of most likely tokens; 0 = off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw only from tokens at least this probable, relative to the most probable token; 0 = off."""
    stop: tuple[str, ...] = ()
    """A turn ends when one of these texts appears. The text stays in the turn."""
    ignore_eos: bool = False
    """Do not stop at the end token but at ``max_new_tokens``; for benchmarks only."""


class FilterSection(ComponentConfig):
    """Dynamic filter on a group's scores, without penalties. A rejected group is replaced by a new prompt."""

    low: float | None = None
    """Keep a group only if low < mean(score); strict."""
    high: float | None = None
    """Keep a group only if mean(score) < high; strict."""
    min_std: float | None = None
    """Keep a group only if std(score) > min_std."""
    max_rounds: Count = 20
    """Stop refilling a batch after this many rounds and train on the accepted groups. The missing groups are counted
    (``stream/short``)."""


class StreamSection(ComponentConfig):
    mode: Literal["waves", "continuous"] = "waves"
    """``waves``: a batch is generated whole, then the policy learns from it. ``continuous``: samples continue while the
    policy learns; this needs a launcher with the capability ``answers``."""
    staleness: NotNegative = 0
    """S: number of steps by which the sampling weights may be behind the policy. ``waves``: batch k is generated with
    the weights of version max(0, k - S). ``continuous``: no token that step k trains on is older than version k - S;
    with 0 nothing is generated while the policy learns."""
    order: Literal["submission", "completion"] = "submission"
    """``continuous``: which groups a batch takes. ``submission``: those that were started first. ``completion``: those
    that were scored first, and those that would become too old; batches then hold short answers first."""
    oversample: Annotated[float, Field(ge=1)] | None = None
    """``continuous``: largest number of batches that are started and not yet trained on. Default: as many as staleness
    allows."""
    round: Count = 1
    """R: batches of R steps are all generated before the first of them, with the weights of version R * (k // R)."""
    filter: FilterSection | None = None
    """Dynamic filter; off by default."""
    on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort"
    """What happens if the rollout or the reward of a sample fails. ``abort``: the run ends. ``drop_sample``: the sample
    is left out. ``drop_group``: its group is left out and replaced."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of failed samples with which a run continues, if ``on_failed_sample`` is not ``abort``; it always
    applies to evaluations. The share is over the latest samples: as many as a batch has, and at least 64."""
    rollout_deadline: Positive = 600.0
    """Seconds for the whole rollout of one sample, without the time of generation."""
    replay: PathText | None = None
    """Folder of a run: train on the samples that it trained on, batch by batch, and sample nothing. The other options
    of this section must be its own. `rlhf replay` sets all that is needed."""


class RewardSection(Choice):
    name: NameText = ""
    """Name in metrics and flags; if empty, the name in the reference."""
    weight: float = 1.0
    """Weight of its values in the trajectory's reward."""
    deadline: Positive = 60.0
    """Seconds for one call. A function of one sample is called for each sample, any other reward for each group. Time
    spent waiting for a free call or for a model of this run does not count."""
    python: PathText | None = None
    """Program that runs a plain ``def`` reward: the Python of a virtual environment with packages of its own,
    ``DIR/bin/python``. `rlhf plugins isolate` makes one. Default: the Python of the run."""
    concurrency: Count | None = None
    """Largest number of calls under way at once. Default: the plugin's, if it names one; else 64 for an ``async def``;
    for a plain ``def``, which runs in worker processes, one per processor and at most 4."""
    retries: NotNegative = 0
    """Further attempts after an error or a missed deadline, before the samples count as failed."""
    sources: tuple[str, ...] = ()
    """Names of the sources in ``[data]`` whose rows it scores; empty: all rows."""
    credit: Literal["outcome", "step"] = "outcome"
    """Credit of process rewards. ``outcome``: their sum is added to the reward at the end. ``step``: each is placed at
    its (turn, token)."""


class EnvSection(Choice):
    deadline: Positive = 60.0
    """Seconds for one call."""
    max_turns: Count = 8
    """Number of the policy's turns after which an episode is ended."""
    python: PathText | None = None
    """Program that runs a plain ``def`` environment: the Python of a virtual environment with packages of its own,
    ``DIR/bin/python``. `rlhf plugins isolate` makes one. Default: the Python of the run."""
    concurrency: Count | None = None
    """Largest number of episodes open at once. Default: 256 for an ``async def`` environment; 16 for a plain ``def``
    environment, each in a worker process."""
    credit: Literal["outcome", "step"] = "outcome"
    """Credit of the environment's turn rewards. ``outcome``: their sum is at the end of the episode; every advantage
    estimator supports this. ``step``: each is placed at the last token of its turn, so that later tokens get no credit
    for it. This needs an estimator that reads rewards at tokens and has no baseline over groups. Evaluation uses the
    sum."""
