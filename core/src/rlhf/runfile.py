"""The run file, section by section. ``config.py`` loads TOML and flags into these; nothing else reads them raw.

A component's section holds ``use = "name"`` and, beside it, the plugin's own options (checked against its Config
once the plugin is resolved). Everything here is frozen; unknown keys are errors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from rlhf.flags import PLUGIN_OPTIONS
from rlhf.hub import hub_name
from rlhf.interfaces.component import ComponentConfig

PluginOptions = Annotated[dict[str, Any], PLUGIN_OPTIONS]
Count = Annotated[int, Field(gt=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


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
    output: str = "runs/latest"
    """The run directory. Refused where it already holds a run, unless ``resume``."""
    steps: Count | None = None
    """Controller steps. Where absent: ``epochs`` passes over the data."""
    epochs: Positive = 1.0
    """Passes over the training data; 0.5 is half of it. Not read where ``steps`` is set. Steps are counted as if every
    row were used: where rows are left out (``data.too_long``, ``data.bad_rows``) or groups are filtered, others take
    their places, and the run goes further than this (metric ``epoch``)."""
    seed: int = 0
    """Every random choice is a function of it and of counters."""
    resume: bool = False
    """Continue from the newest complete checkpoint in ``output``."""
    threads: Count | None = None
    """torch threads; where absent torch decides. Recorded, as it can change results between runs."""
    requires: tuple[str, ...] = ()
    """Requirements on plugins, e.g. ``"rlhf-plugin-math>=0.1"``; checked before anything starts."""


class SourceSection(ComponentConfig):
    path: str
    """A jsonl / json / csv / parquet / arrow file (``.gz`` allowed), a folder saved by ``datasets``, or a name on
    the hub: ``owner/name``, or ``owner/name@revision`` with a branch, tag or commit."""
    name: str = ""
    """For per-source metrics; the file's stem where empty."""
    split: str = "train"
    """Of a hub name or a saved folder."""
    subset: str | None = None
    """Configuration of a hub name."""
    probability: Share | None = None
    """Share of draws; give it for all sources or for none (then sources are concatenated)."""
    max_rows: Count | None = None
    """Use only the first rows."""

    @property
    def label(self) -> str:
        """``name``, or the file's stem."""
        stem = self.path.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].split(".")[0]
        asked = hub_name(self.path)
        return self.name or (asked.name.rsplit("/", 1)[-1] if asked and "@" in self.path else stem) or self.path


class DataSection(ComponentConfig):
    train: tuple[SourceSection, ...] = ()
    """Sources; a text is the path of one."""
    eval: tuple[SourceSection, ...] = ()
    """Sources of held-out rows, each used once an evaluation."""
    batch_size: Count = 16
    """Prompts (online) or rows (offline) per step."""
    shuffle: bool = True
    """Another order in every pass, from ``run.seed``; false: as the sources are written."""
    prompt: str | None = None
    """Column with the prompt: text, or a list of ``{role, content}`` messages. Where this and the columns below are
    absent they are ``prompt``, ``response``, ``chosen``, ... where a source has these, and recognised else."""
    response: str | None = None
    """Column with the answer (demonstrations, labels); ``messages`` takes its place where set."""
    messages: str | None = None
    """Column with whole conversations (demonstrations, labels)."""
    chosen: str | None = None
    """Column with the better answer of a pair."""
    rejected: str | None = None
    """Column with the worse answer of a pair."""
    margin: str | None = None
    """Column with how much better the chosen answer of a pair is (a number); read only where named."""
    label: str | None = None
    """Column with the label of an answer: true or false, 1 or 0, ``+`` or ``-``; ``label`` where absent."""
    steps: str | None = None
    """Column with the steps of a solution: a list of texts; ``completions`` where absent."""
    step_labels: str | None = None
    """Column with a label for each step: as ``label``, or the probability that the step is right (0 to 1); ``labels``
    where absent."""
    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text after each step; a step ends at the token in which it ends."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """``chat``: the tokenizer's chat template (an error where it has none); ``plain``: text as it is; ``auto``: chat
    where the tokenizer has a template."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template, e.g. ``enable_thinking = false``."""
    system: str | None = None
    """System message put before every prompt (chat), or text put before it (plain)."""
    input_template: str | None = None
    """Plain only: a format string with column names, e.g. ``"Q: {question}\\nA: "``; replaces ``prompt``."""
    loss_on: Literal["completion", "assistant", "all"] = "completion"
    """Offline: train on the last answer, on all assistant turns, or on all tokens (continued pre-training)."""
    add_eos: bool = True
    """Plain only: end demonstrations with the end token."""
    max_prompt_tokens: Count | None = None
    """Longest prompt; where absent only ``max_tokens`` bounds it."""
    max_tokens: Count = 2048
    """Longest sequence: prompt, observations and answers."""
    too_long: Literal["error", "drop"] = "error"
    """Rows over the limits: refused with file and line, or dropped and counted. Never cut."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows from which nothing can be learnt or that cannot be read (an empty answer, equal answers of a pair, a label
    that is none): refused with file and line, or dropped and counted."""

    @model_validator(mode="after")
    def _sources(self) -> DataSection:
        for key, sources in (("train", self.train), ("eval", self.eval)):
            unique([s.label for s in sources], f"data.{key}: two sources are named", "give one of them another `name`")
        if any(s.probability is not None for s in self.eval):
            raise ValueError("data.eval: probabilities are for training data; every evaluation row is used once")
        given = [s.probability for s in self.train if s.probability is not None]
        if given and len(given) != len(self.train):
            without = [s.label for s in self.train if s.probability is None]
            raise ValueError(f"data.train: give a probability for every source or for none; {without} have none")
        if given and abs(sum(given) - 1) > 1e-6:
            raise ValueError(f"data.train: probabilities must sum to 1, got {given}, which sum to {sum(given):g}")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens >= self.max_tokens:
            raise ValueError(
                f"data.max_prompt_tokens = {self.max_prompt_tokens} leaves no room for an answer within "
                f"data.max_tokens = {self.max_tokens}"
            )
        return self


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
    rollout_deadline: Positive = 600.0
    """Seconds for one sample's whole rollout, generation excluded."""


class RewardSection(Choice):
    name: str = ""
    """In metrics and flags; what the reference names where empty."""
    weight: float = 1.0
    """Of its values in the trajectory's reward."""
    deadline: Positive = 60.0
    """Seconds for scoring one group; while the reward waits for a model of this run they do not count."""
    retries: NotNegative = 0
    """Further attempts after an error or a missed deadline, before the samples count as failed."""
    credit: Literal["outcome", "step"] = "outcome"
    """Where process rewards go: summed at the end, or placed at their (turn, token)."""


class EnvSection(Choice):
    deadline: Positive = 60.0
    """Seconds for one call."""
    max_turns: Count = 8
    """Turns of the policy after which an episode is ended."""
    concurrency: Count = 16
    """Episodes open at once, for environments that run in worker processes."""


class ModelSection(ComponentConfig):
    model: str | None = None
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
    metric: str | None = None
    """Metric of the best checkpoint; where absent the first of pass@1 and loss that exists."""
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
    save_rollouts: bool = True
    """Write the samples of every step to ``rollouts/``."""


def unique(names: Sequence[str], what: str, remedy: str) -> None:
    """Raises ValueError where a name occurs twice."""
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ValueError(f"{what} {', '.join(map(repr, twice))}; {remedy}")


SINGLE: dict[str, type[Choice]] = {
    "algorithm": Choice,
    "rollout": Choice,
    "env": EnvSection,
    "trainer": Choice,
    "generator": Choice,
    "launcher": Choice,
}
"""Sections that hold one plugin."""
LISTS: dict[str, type[Choice]] = {"reward": RewardSection, "observer": Choice}
"""Sections that hold several."""


def _with_options(cls: type[Choice], value: Any) -> Any:
    """``{use, a, b}`` -> ``{use, options: {a, b}}``, keeping the section's own fields."""
    if not isinstance(value, dict) or "options" in value:
        return value
    own = {k: v for k, v in value.items() if k in cls.model_fields}
    return {**own, "options": {k: v for k, v in value.items() if k not in cls.model_fields}}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _source(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


def expand(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms as tables and lists of tables, with plugins' options still beside ``use``."""
    data = dict(data)
    for key in SINGLE:
        if isinstance(data.get(key), str):
            data[key] = {"use": data[key]}
    for key in LISTS:
        if key in data:
            data[key] = [{"use": v} if isinstance(v, str) else v for v in _listed(data[key])]
    if isinstance(data.get("data"), dict):
        short = {k: list(map(_source, _listed(data["data"][k]))) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **short}
    return data


def long_form(data: dict[str, Any]) -> dict[str, Any]:
    """Short forms spelled out (``algorithm = "NAME"``, ``reward = ["NAME", ...]``, ``data.train = "FILE"``) and
    plugins' options put apart, as the sections below hold them."""
    data = expand(data)
    for key, cls in SINGLE.items():
        if key in data:
            data[key] = _with_options(cls, data[key])
            usual = RunFile.model_fields[key].default
            if isinstance(usual, Choice) and isinstance(data[key], dict):  # `[trainer] lr = 1e-5` is of the usual one
                data[key] = {"use": usual.use, **data[key]}
    for key, cls in LISTS.items():
        if key in data:
            data[key] = tuple(_with_options(cls, v) for v in data[key])
    if isinstance(data.get("data"), dict):
        sources = {k: tuple(data["data"][k]) for k in ("train", "eval") if k in data["data"]}
        data["data"] = {**data["data"], **sources}
    return data


class Origins(dict[str, str]):
    """{dotted path: file and line, or flag} of what the user wrote; takes no part in comparing run files."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins)

    __hash__ = None


class RunFile(ComponentConfig):
    run: RunSection = RunSection()
    algorithm: Choice
    data: DataSection = DataSection()
    sampling: SamplingSection = SamplingSection()
    stream: StreamSection = StreamSection()
    rollout: Choice = Choice(use="single_turn")
    env: EnvSection | None = None
    reward: tuple[RewardSection, ...] = ()
    policy: ModelSection = ModelSection()
    critic: ModelSection = ModelSection()
    reference: ModelSection = ModelSection()
    roles: dict[str, ModelSection] = Field(default_factory=dict)
    """Further roles by name (reward models)."""
    trainer: Choice = Choice(use="torch")
    generator: Choice = Choice(use="transformers")
    launcher: Choice = Choice(use="local")
    placement: dict[str, PlacementSection] = Field(default_factory=dict)
    """By role name, and ``generator``; what is not named has one rank on one device."""
    sync: SyncSection = SyncSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observer: tuple[Choice, ...] = ()

    _origins: Origins = PrivateAttr(default_factory=Origins)

    @property
    def origins(self) -> Origins:
        """Where each value was written, for error messages; empty where the run file was made in Python."""
        return self._origins

    @model_validator(mode="before")
    @classmethod
    def _long_form(cls, data: Any) -> Any:
        return long_form(data) if isinstance(data, dict) else data

    @model_validator(mode="after")
    def _names(self) -> RunFile:
        unique([r.label for r in self.reward], "reward: two are named", "give one of them another `name`")
        unique([o.label for o in self.observer], "observer: listed twice:", "list it once")
        return self
