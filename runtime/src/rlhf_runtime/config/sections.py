"""The sections of the run file. The section of the data is in :mod:`rlhf_runtime.config.data_section`.

A component's section holds ``use = "name"`` and, beside it, the plugin's own options (checked against its Config
once the plugin is resolved). Everything here is frozen; unknown keys are errors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from rlhf.interfaces.component import ComponentConfig
from rlhf.paths import PathText

from rlhf_runtime.config.flag_values import PLUGIN_OPTIONS

PluginOptions = Annotated[dict[str, Any], PLUGIN_OPTIONS]
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
MAX_STEPS = 10_000_000
"""Of one run. What each step trains is asked before the run starts, which takes about 3 microseconds a step."""


def unique(names: Sequence[str], what: str, remedy: str) -> None:
    """Raises ValueError where a name occurs twice."""
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ValueError(f"{what} {', '.join(map(repr, twice))}; {remedy}")


class Choice(ComponentConfig):
    """A plugin by reference, with its options: ``use = "math"``, ``"dist/math"``, ``"plugin:math"``,
    ``"file:reward.py:score"``."""

    use: str
    options: PluginOptions = Field(default_factory=dict)
    """All keys of the section but the reserved ones; validated by the plugin's Config."""

    @property
    def label(self) -> str:
        """What a flag and a metric call it: the section's ``name``, else what the reference names."""
        return getattr(self, "name", "") or label_of(self.use)


def label_of(ref: str) -> str:
    """``plugin:math``, ``dist/math`` -> ``math``; ``file:judge.py:score`` -> ``judge``; ``model:PATH`` -> ``model``."""
    scheme, colon, rest = ref.partition(":")
    if not colon or scheme == "plugin":
        return (rest or scheme).rsplit("/", 1)[-1]
    if scheme == "file":
        return re.sub(r"\.py(:\w+)?$", "", rest.replace("\\", "/").rsplit("/", 1)[-1])
    return "http" if scheme == "https" else scheme


class RunSection(ComponentConfig):
    name: str = ""
    """Shown in logs; the output folder's name where empty."""
    output: PathText = "runs/latest"
    """The run directory. Refused where it already holds a run that finished a step, unless ``resume`` or ``overwrite``.
    Where absent: the next of ``runs/1``, ``runs/2``, ..., to which ``runs/latest`` links."""
    steps: Annotated[int, Field(gt=0, le=MAX_STEPS)] | None = None
    """Controller steps, at most 10 million. Where absent: ``epochs`` passes over the data."""
    epochs: Positive = 1.0
    """Passes over the training data; 0.5 is half of it. Not read where ``steps`` is set. Steps are counted as if every
    row were used: where rows are left out (``data.too_long``, ``data.bad_rows``) or groups are filtered, others take
    their places, and the run goes further than this (metric ``epoch``)."""
    seed: int = 0
    """Every random choice is a function of it and of counters."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``output``."""
    overwrite: bool = False
    """Delete the run in ``output``: what runs write there, nothing else."""
    threads: Count | None = None
    """torch threads; where absent torch decides. Recorded, as it can change results between runs."""
    show_samples: Count | None = None
    """Print the best and the worst sample of every so many steps. Where absent: none. `rlhf samples` shows more."""
    requires: tuple[str, ...] = ()
    """Requirements on plugins, e.g. ``"rlhf-plugin-math>=0.1"``; checked before anything starts."""


class SamplingSection(ComponentConfig):
    samples_per_prompt: Count = 1
    """Answers drawn per prompt: the group size."""
    max_new_tokens: Count = 256
    """Longest sampled turn, in tokens."""
    temperature: Positive = 1.0
    """Divides the logits, in sampling and in training alike."""
    top_p: Share = 1.0
    """Draw from the most likely tokens that hold this share; 1 = off. Training allows it with an importance correction
    only, and so it does ``top_k`` and ``min_p``."""
    top_k: NotNegative = 0
    """Draw from so many most likely tokens; 0 = off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Draw from tokens at least this likely, relative to the likeliest; 0 = off."""
    stop: tuple[str, ...] = ()
    """A turn ends where one of these texts appears; it stays in the turn."""
    ignore_eos: bool = False
    """Sample on to ``max_new_tokens``; benchmarks only."""


class FilterSection(ComponentConfig):
    """Dynamic filter on the group's scores, before any penalty; a rejected group is replaced by a new prompt."""

    low: float | None = None
    """Keep a group only if low < mean(score); strict."""
    high: float | None = None
    """Keep a group only if mean(score) < high; strict."""
    min_std: float | None = None
    """Keep a group only if std(score) > min_std."""
    max_rounds: Count = 20
    """Give up refilling a batch after this many rounds and train on what was accepted (counted, never lost)."""


class StreamSection(ComponentConfig):
    staleness: NotNegative = 0
    """S: batch k is generated with the weights of version max(0, k - S)."""
    round: Count = 1
    """R: batches of R steps are all generated before the first of them, with the weights of version R * (k // R)."""
    filter: FilterSection | None = None
    """Dynamic filter, off where absent."""
    on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort"
    """What happens to a sample whose rollout or reward failed: end the run, leave it out, or leave its group out and
    refill."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of failed samples with which a run goes on where ``on_failed_sample`` is not ``abort``, and an
    evaluation in any case. Of the latest samples: those drawn for a batch at once, with earlier ones 64 at least."""
    rollout_deadline: Positive = 600.0
    """Seconds for one sample's whole rollout, generation excluded."""


class RewardSection(Choice):
    name: str = ""
    """In metrics and flags; what the reference names where empty."""
    weight: float = 1.0
    """Of its values in the trajectory's reward."""
    deadline: Positive = 60.0
    """Seconds for one call: a function of one sample is called for each, anything else for a group. Waiting for a turn
    to be called, or for a model of this run, does not count."""
    concurrency: Count | None = None
    """Calls under way at once. Where absent: 64 of an ``async def``; of a plain ``def``, which runs in worker
    processes, one per processor and at most 4."""
    retries: NotNegative = 0
    """Further attempts after an error or a missed deadline, before the samples count as failed."""
    credit: Literal["outcome", "step"] = "outcome"
    """Where process rewards go: summed at the end, or placed at their (turn, token)."""


class EnvSection(Choice):
    deadline: Positive = 60.0
    """Seconds for one call."""
    max_turns: Count = 8
    """Turns of the policy after which an episode is ended."""
    concurrency: Count | None = None
    """Episodes open at once. Where absent: 256 of an environment that is ``async def``; 16 of one that is plain
    ``def``, each in a worker process."""
    credit: Literal["outcome", "step"] = "outcome"
    """Where the rewards of its turns go: summed at the end of the episode, which every advantage estimator compares; or
    each at the last token of its turn, so that no later token gets credit for it. The latter needs an estimator that
    reads rewards at tokens and has no baseline over groups. In evaluation they are summed."""


class ModelSection(ComponentConfig):
    model: PathText | None = None
    """A folder, or a name on the hub: ``owner/name``, or ``owner/name@revision`` with a branch, tag or commit."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic; ``auto``: bf16 where the device gains by it. Weights are fp32 in any case."""
    gradient_checkpointing: bool = False
    """Compute layers again in the backward pass: less memory, more time, equal results."""
    micro_tokens: Count | None = None
    """Token budget of a micro-batch; where absent the trainer's own choice. Results do not depend on it; memory and
    speed do. A longer unit is alone in its micro-batch."""
    precompute: bool = False
    """Offline, frozen roles: compute what the algorithm reads off the model for every row before the first step, and
    let the model go. Kept in the run directory."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model's files."""
    trainer: PluginOptions = Field(default_factory=dict)
    """Laid over ``[trainer]`` for this role."""


class PlacementSection(ComponentConfig):
    """Where one role lives, ``[placement.ROLE]``; ``[placement.generator]`` is for the engines."""

    ranks: Count = 1
    """Processes of the role; engines of the generator."""
    devices: Count = 1
    """Devices per rank: GPUs, or CPU cores where there are none."""
    share: str | None = None
    """Live on the devices of this role; then it has that role's ``devices``."""


class SyncSection(ComponentConfig):
    """How new weights reach a generator that holds its own copy of them."""

    check: Literal["fail", "retry", "warn"] = "fail"
    """Where the proof after a sync does not hold: end the run, send once more and then end it, or go on and say so."""
    transport: Literal["auto", "store", "shared", "broadcast"] = "auto"
    """The way between processes: ``store``, through host memory by Ray's object store; ``shared``, memory that both
    sides map (CUDA IPC on GPUs, for engines that share the policy's devices); ``broadcast``, one collective (NCCL on
    GPUs, gloo elsewhere, for engines on devices of their own). ``auto``: on GPUs the one of the last two that fits the
    placement, else ``store``."""
    bucket_mb: Count = 256
    """Most MiB sent at once."""
    timeout: Positive = 600.0
    """Seconds for one bucket to be sent and taken."""
    canaries: NotNegative = 2
    """Sequences of random tokens whose log-probs are compared after each sync; 0 compares fingerprints only."""
    tolerance: Positive | None = None
    """Largest mean difference of a canary's log-probs; where absent 1e-4 in fp32 and 0.05 where either side computes in
    bf16."""


class EvalSection(ComponentConfig):
    every: Count | None = None
    """Steps; where absent: at the end only, if there is evaluation data."""
    at_start: bool = False
    """Evaluate before the first step too (as step 0)."""
    samples: Count = 1
    """Answers per prompt, for avg@k and pass@k."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 = greedy."""
    max_new_tokens: Count | None = None
    """``sampling.max_new_tokens`` where absent."""
    pass_threshold: float = 1.0
    """An answer passes if its reward is at least this."""
    max_rows: Count | None = None
    """Use only the first rows."""
    weights: Literal["exported", "live"] = "exported"
    """What is evaluated where the trainer keeps a moving average: the average, which is what ``model/`` will hold, or
    the weights that are trained."""
    metric: str | None = None
    """Metric of the best checkpoint: a name that the evaluation reports, with or without ``eval/`` in front; where
    absent the first of pass@1 and loss that exists."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Which way is better; ``auto``: down for losses, else up."""
    patience: Count | None = None
    """Stop after this many evaluations without improvement."""


class CheckpointSection(ComponentConfig):
    every: Count | None = None
    """Steps; where absent: at the end, and where evaluation finds a new best."""
    keep: Count = 3
    """How many of the newest stay; the best one stays besides. Also of exports."""
    save_best: bool = True
    """Save where evaluation finds a new best, and never rotate that one away."""
    export_every: Count | None = None
    """Steps between Hugging Face exports to ``exports/step-N``; the final one is ``model/``."""
    export_trained: bool = False
    """At the end export the other trained roles too: the critic to ``model-critic/``, to start another run from."""
    save_rollouts: bool = True
    """Write the samples of every step to ``rollouts/``."""
