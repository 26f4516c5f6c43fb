"""The sections of the run file, other than ``[data]`` (:mod:`rlhf_runtime.config.data_section`).

A component's section holds ``use = "name"`` and the plugin's own options, which are checked against its Config when the
plugin is resolved. All sections are frozen; unknown keys are errors.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from rlhf.fields import PathText
from rlhf.interfaces.component import ComponentConfig

from rlhf_runtime.config.flag_values import PLUGIN_OPTIONS


def _name(text: str) -> str:
    if wrong := sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cs")}):
        raise ValueError(
            f"the name {text!r} contains {wrong[0]!r}, a control character. Use letters, digits and symbols."
        )
    return text


NameText = Annotated[str, AfterValidator(_name)]
"""A name in logs, metrics and flags."""
PluginOptions = Annotated[dict[str, Any], PLUGIN_OPTIONS]
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
MAX_STEPS = 10_000_000
"""Largest number of steps of one run. Before the run, the updates of every step are planned, which takes about 3
microseconds per step."""


def unique(names: Sequence[str], problem: str, remedy: str) -> None:
    """Raises ValueError if a name occurs twice."""
    duplicates = [name for name, n in Counter(names).items() if n > 1]
    if duplicates:
        raise ValueError(f"{problem} {', '.join(map(repr, duplicates))}; {remedy}")


class Choice(ComponentConfig):
    """A plugin by reference, with its options: ``use = "math"``, ``"dist/math"``, ``"plugin:math"``,
    ``"file:reward.py:score"``."""

    use: str
    options: PluginOptions = Field(default_factory=dict)
    """All keys of the section except the reserved ones; validated by the plugin's Config."""

    @property
    def label(self) -> str:
        """Name in flags and metrics: the section's ``name``, else the name in the reference."""
        return getattr(self, "name", "") or label_of(self.use)


def label_of(ref: str) -> str:
    """``plugin:math``, ``dist/math`` -> ``math``; ``file:judge.py:score`` -> ``judge``; ``python:trl.rewards:f`` ->
    ``f``; ``model:PATH`` -> ``model``."""
    scheme, colon, rest = ref.partition(":")
    if not colon or scheme == "plugin":
        return (rest or scheme).rsplit("/", 1)[-1]
    if scheme == "python":
        return rest.rpartition(":")[2]
    if scheme == "file":
        return re.sub(r"\.py(:\w+)?$", "", rest.replace("\\", "/").rsplit("/", 1)[-1])
    return "http" if scheme == "https" else scheme


ROLES = ("policy", "critic", "reference")
"""Roles whose models have a section of their own. The other roles are in ``[roles]``."""


def section_path(role: str) -> str:
    """The path of the section about a role's model: ``critic``, ``roles.NAME``."""
    return role if role in ROLES else f"roles.{role}"


class RunSection(ComponentConfig):
    name: NameText = ""
    """Name of the run in logs; if empty, the output folder's name."""
    output: PathText = "runs/latest"
    """The run directory; if not set, the next of ``runs/1``, ``runs/2``, ..., to which ``runs/latest`` links. Refused
    if it already holds a run that finished a step, unless ``resume`` or ``overwrite`` is set."""
    steps: Annotated[int, Field(gt=0, le=MAX_STEPS)] | None = None
    """Number of steps, at most 10 million. Default: the steps of ``epochs`` passes over the data."""
    epochs: Positive = 1.0
    """Passes over the training data; 0.5 is half of it. Not used if ``steps`` is set. The number of steps is computed
    as if every row were used. Later rows replace dropped rows (``data.too_long``, ``data.bad_rows``) and filtered
    groups, so the run may read more than this (metric ``epoch``)."""
    stop_after: Count | None = None
    """End the run after this step with a checkpoint, as a signal does. Learning rates and other schedules remain those
    of all ``steps``. A resume continues the run. Default: the last step."""
    seed: int = 0
    """Seed of the run. Every random choice is computed from the seed and counters."""
    resume: bool = False
    """Continue from the newest checkpoint in ``output``."""
    overwrite: bool = False
    """Delete the run in ``output``: the files that runs write, nothing else."""
    threads: Count | None = None
    """Number of torch threads of the run's own process, which trains and samples with the launcher ``local``; default:
    torch's own choice. Recorded, because it can change results between runs. Workers of other launchers have as many as
    ``placement.ROLE.devices``, or OMP_NUM_THREADS."""
    show_samples: Count | None = None
    """Print the best and the worst sample every N steps. Default: never. `rlhf samples` shows more."""
    timeline: Count | None = None
    """Record a timeline of the first N steps in ``timeline.json``, which ui.perfetto.dev opens. A resume records N
    more. Default: none."""
    report: bool = True
    """At the end of the run, write ``report.html``, a page about the run, to its folder (`rlhf report`)."""
    peak_tflops: Positive | None = None
    """Peak of one device of the policy in TFLOP/s, for the metric ``throughput/mfu``. Default: the known bf16 peak of
    the GPU. Without a known peak there is no such metric."""
    requires: tuple[str, ...] = ()
    """Requirements on plugins, e.g. ``"rlhf-plugin-math>=0.1"``; checked before anything starts."""

    @model_validator(mode="after")
    def _stops_within_the_run(self) -> RunSection:
        if self.steps is not None and self.stop_after is not None and self.stop_after > self.steps:
            raise ValueError(
                f"run.stop_after = {self.stop_after}, but the run has only run.steps = {self.steps}. Remove stop_after."
            )
        return self


class ModelSection(ComponentConfig):
    model: PathText | None = None
    """A folder or a hub name: ``owner/name``, or ``owner/name@revision`` with a branch, tag or commit."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Arithmetic of forward and backward. ``auto``: bf16 if the device is faster with it, or if ``storage`` is bf16."""
    storage: Literal["fp32", "bf16"] | None = None
    """Number format of the weights. ``bf16`` halves the bytes of weights, gathers, syncs and exports. The optimizer of
    a trained role steps fp32 masters, so small steps are not lost. Default: that of the role whose model this role
    starts from, else fp32."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: less memory, more time, equal results."""
    micro_tokens: Count | None = None
    """Largest number of tokens in a micro-batch; default: the trainer's choice. It affects memory and speed, not
    results. A longer unit gets its own micro-batch."""
    precompute: bool = False
    """Frozen roles of offline runs: compute the outputs that the algorithm reads for every row before the first step,
    then unload the model. The outputs are kept in the run directory."""
    trust_remote_code: bool = False
    """Allow Python code in the model's files to run."""
    trainer: PluginOptions = Field(default_factory=dict)
    """Options that replace those of ``[trainer]`` for this role."""


class PlacementSection(ComponentConfig):
    """Processes and devices of one role, ``[placement.ROLE]``; ``[placement.generator]`` is for the engines."""

    ranks: Count | None = None
    """Processes of the role; engines of the generator. Default: 1, or with ``share`` as many as that role has,
    as far as they fit."""
    devices: Count = 1
    """Devices per rank: GPUs, or CPU cores where there are none."""
    share: str | None = None
    """Use the devices of this role, with that role's ``devices``."""


class SyncSection(ComponentConfig):
    """How new weights reach a generator that holds its own copy of them."""

    in_flight: Literal["continue", "drain", "restart"] = "continue"
    """``stream.mode = "continuous"``: what new weights do to unfinished answers. ``continue``: the next tokens are
    sampled with them. ``drain``: the weights wait until the answers are finished. ``restart``: the answers are sampled
    again from their first token."""
    keys: Literal["recompute", "keep"] = "recompute"
    """Keys and values of the tokens so far, with ``in_flight = "continue"``. ``recompute``: the generator recomputes
    them with the new weights, so that log-probs of further tokens are those of the new policy. ``keep``: it continues
    at once with the old ones. The log-probs are then those of a mixture of both policies."""
    adapters: Literal["merged", "alone"] = "merged"
    """With ``trainer.lora``: what is sent after an update. ``merged``: the whole model with merged adapters, in the
    engine's number format. ``alone``: only the adapters; the engine computes with the base and separate adapters."""
    check: Literal["fail", "retry", "warn"] = "fail"
    """What happens if the proof after a sync fails. ``fail``: the run ends. ``retry``: the weights are sent once
    more, and the run ends if the proof fails again. ``warn``: the run goes on with a warning."""
    transport: Literal["auto", "store", "shared", "broadcast"] = "auto"
    """How weights are sent between processes. ``store``: through host memory, by Ray's object store. ``shared``: memory
    that both sides map (CUDA IPC on GPUs), for engines that share the policy's devices. ``broadcast``: one collective
    (NCCL on GPUs, gloo elsewhere), for engines on other devices. ``auto``: on GPUs ``shared`` or ``broadcast``, as the
    placement requires, else ``store``."""
    bucket_mb: Count = 256
    """Largest bucket of weights, in MiB."""
    timeout: Positive = 600.0
    """Seconds for sending and loading one bucket."""
    canaries: NotNegative = 2
    """Number of random token sequences whose log-probs are compared after each sync. A run with images has one more,
    with an image. 0: compare only fingerprints."""
    tolerance: Positive | None = None
    """Largest allowed difference of log-probs. In fp32: the mean of each canary, default 1e-4. If either side computes
    in bf16: the median of all, default 0.3. If the generator computes in fp8: the median of all, default 0.8."""


class EvalSection(ComponentConfig):
    every: Count | None = None
    """Steps between evaluations. Default: evaluate only at the end, if there is evaluation data."""
    at_start: bool = False
    """Also evaluate before the first step (as step 0)."""
    samples: Count = 1
    """Answers per prompt, for avg@k and pass@k."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 = greedy."""
    max_new_tokens: Count | None = None
    """Largest number of tokens in a sampled turn. Default: ``sampling.max_new_tokens``."""
    pass_threshold: float | None = None
    """An answer passes if its reward is at least this. Default: 1. If a reward is a score without such a threshold (a
    reward model), no answer passes or fails, and there is no pass@k."""
    max_rows: Count | None = None
    """Use only the first rows of each source."""
    weights: Literal["exported", "live"] = "exported"
    """Weights to evaluate if the trainer keeps a moving average. ``exported``: the average, which is also exported to
    ``model/``. ``live``: the trained weights."""
    metric: str | None = None
    """Evaluation metric that selects the best checkpoint, with or without the prefix ``eval/``, such as ``reward`` or
    ``env/KEY``. Default: the first that exists of pass@1, score, reward and loss."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Direction in which the metric improves; ``auto``: down for losses, up for other metrics."""
    patience: Count | None = None
    """Stop the run after this many evaluations without improvement."""


class CheckpointSection(ComponentConfig):
    every: Count | None = None
    """Steps between checkpoints. Default: at the end, and when evaluation finds a new best."""
    keep: Count = 3
    """Number of newest checkpoints to keep, in addition to the best one. Also applies to exports."""
    save_best: bool = True
    """Save a checkpoint when evaluation finds a new best, and keep it until there is a better one."""
    export_best: bool = True
    """Also export the model of the best evaluation so far, in Hugging Face format, to ``model-best/`` when the best
    checkpoint is saved. ``model/`` is that of the last step."""
    export_every: Count | None = None
    """Steps between Hugging Face exports to ``exports/step-N``. The final export is ``model/``."""
    export_trained: bool = False
    """At the end, also export the other trained roles, such as the critic to ``model-critic/``, so that another run can
    start from them."""
    save_rollouts: bool = True
    """Write the samples of every step to ``rollouts/``, and the answers of every evaluation to ``evaluations/``."""


GROUP = 8
"""Default of ``sampling.samples_per_prompt`` for algorithms that compare the samples of a prompt."""


class SamplingSection(ComponentConfig):
    samples_per_prompt: Count = 1
    """Answers drawn per prompt: the group size. Default: 8 if the algorithm compares the answers to a prompt."""
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
    """S: number of steps by which the sampling weights may lag behind the policy. ``waves``: batch k is generated with
    the weights of version max(0, k - S). ``continuous``: no token that step k trains on is older than version k - S;
    with 0 nothing is generated while the policy learns."""
    order: Literal["submission", "completion"] = "submission"
    """``continuous``: which groups a batch takes. ``submission``: those that were started first. ``completion``: those
    that were scored first, and those that would become too old. Batches then hold short answers first."""
    oversample: Annotated[float, Field(ge=1)] | None = None
    """``continuous``: largest number of batches that are started and not yet trained on. Default: the most that
    staleness allows."""
    round: Count = 1
    """R: batches of R steps are all generated before the first of them, with the weights of version R * (k // R)."""
    filter: FilterSection | None = None
    """Dynamic filter; off by default."""
    on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort"
    """What happens if the rollout or the reward of a sample fails. ``abort``: the run ends. ``drop_sample``: the sample
    is dropped. ``drop_group``: its group is dropped and replaced."""
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Largest share of failed samples with which a run continues, if ``on_failed_sample`` is not ``abort``. It always
    applies to evaluations. The share is over the latest samples: the number in a batch, but at least 64."""
    rollout_deadline: Positive = 600.0
    """Seconds for the whole rollout of one sample, without the time of generation and of the run's rewards."""
    replay: PathText | None = None
    """Folder of a run: train on the samples that it trained on, batch by batch, and sample nothing. The other options
    of this section must equal those of that run. `rlhf replay` sets everything that is needed."""


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
    """Largest number of concurrent calls. Default: the plugin's, if it sets one; otherwise 64 for an ``async def``. For
    a plain ``def``, which runs in worker processes: one per processor, at most 4."""
    retries: NotNegative = 0
    """Further attempts after an error or a missed deadline, before the samples count as failed."""
    sources: tuple[str, ...] = ()
    """Names of the sources in ``[data]`` whose rows it scores, held-out ones included; empty: all rows."""
    credit: Literal["outcome", "step"] = "outcome"
    """Credit of process rewards. ``outcome``: their sum is added to the reward at the end. ``step``: each is placed at
    its (turn, token)."""


class ObserverSection(Choice):
    names: Literal["own", "trl"] = "own"
    """Names of metrics. ``trl``: the names of TRL for metrics that TRL has, so that a dashboard shows the curves
    together with those of earlier runs."""
    on_error: Literal["abort", "warn"] = "abort"
    """What happens if the observer raises an error after the start, such as a logger whose server is unreachable.
    ``abort``: the run ends. ``warn``: the run prints a note and continues without this observer; a resume starts it
    again."""


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
    """Credit of the environment's turn rewards. ``outcome``: their sum is placed at the end of the episode, which every
    advantage estimator supports. ``step``: each is placed at the last token of its turn, so that later tokens get no
    credit for it. This needs an estimator that reads rewards at tokens and has no group baseline. Evaluation uses the
    sum."""
