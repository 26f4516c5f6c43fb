"""The run file, section by section. ``config.py`` loads TOML and flags into these; nothing else reads them raw.

A component's section holds ``use = "name"`` and, beside it, the plugin's own options (checked against its Config
once the plugin is resolved). Everything here is frozen; unknown keys are errors.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf.interfaces.component import ComponentConfig


class Choice(ComponentConfig):
    """A plugin by reference, with its options: ``use = "math"``, ``"dist/math"``, ``"plugin:math"``,
    ``"file:reward.py:score"``."""

    use: str
    options: dict[str, Any] = Field(default_factory=dict)
    """All keys of the section but the reserved ones; validated by the plugin's Config."""


class RunSection(ComponentConfig):
    name: str = ""
    """Shown in logs; the output folder's name where empty."""
    output: str = "runs/latest"
    """The run directory. Refused where it already holds a run, unless ``resume``."""
    steps: int | None = None
    """Controller steps. Where absent: ``epochs`` passes over the data."""
    epochs: float = 1.0
    seed: int = 0
    resume: bool = False
    """Continue from the newest complete checkpoint in ``output``."""
    threads: int | None = None
    """torch threads; where absent torch decides. Recorded, as it can change results between runs."""
    requires: tuple[str, ...] = ()
    """Requirements on plugins, e.g. ``"rlhf-plugin-grpo>=0.1"``; checked before anything starts."""


class SourceSection(ComponentConfig):
    path: str
    """A jsonl / json / csv / parquet / arrow file (``.gz`` allowed), a folder saved by ``datasets``, or a hub name."""
    name: str = ""
    """For per-source metrics; the file's stem where empty."""
    split: str = "train"
    subset: str | None = None
    probability: float | None = None
    """Share of draws; give it for all sources or for none (then sources are concatenated)."""
    max_rows: int | None = None


class DataSection(ComponentConfig):
    train: tuple[SourceSection, ...] = ()
    eval: tuple[SourceSection, ...] = ()
    batch_size: int = 16
    """Prompts (online) or rows (offline) per step."""
    shuffle: bool = True
    prompt: str = "prompt"
    """Column with the prompt: text, or a list of ``{role, content}`` messages."""
    response: str = "response"
    """Column with the demonstration (offline); ``messages`` takes its place where set."""
    messages: str | None = None
    """Column with whole conversations (offline)."""
    chosen: str = "chosen"
    rejected: str = "rejected"
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
    max_prompt_tokens: int | None = None
    max_tokens: int = 2048
    """Longest sequence: prompt, observations and answers."""
    too_long: Literal["error", "drop"] = "error"
    """Rows over the limits: refused with file and line, or dropped and counted. Never cut."""


class SamplingSection(ComponentConfig):
    samples_per_prompt: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


class FilterSection(ComponentConfig):
    """Dynamic filter on the group's scores, before any penalty; a rejected group is replaced by a new prompt."""

    low: float | None = None
    """Keep a group only if low < mean(score); strict."""
    high: float | None = None
    """Keep a group only if mean(score) < high; strict."""
    min_std: float | None = None
    """Keep a group only if std(score) > min_std."""
    max_rounds: int = 20
    """Give up refilling a batch after this many rounds and train on what was accepted (counted, never lost)."""


class StreamSection(ComponentConfig):
    staleness: int = 0
    """S: batch k is generated with the weights of version max(0, k - S)."""
    filter: FilterSection | None = None
    on_failed_sample: Literal["abort", "drop_sample", "drop_group"] = "abort"
    """What happens to a sample whose rollout or reward failed: end the run, leave it out, or leave its group out and
    refill."""
    rollout_deadline: float = 600.0
    """Seconds for one sample's whole rollout, generation excluded."""


class RewardSection(Choice):
    name: str = ""
    weight: float = 1.0
    deadline: float = 60.0
    """Seconds for scoring one group."""
    retries: int = 0
    credit: Literal["outcome", "step"] = "outcome"
    """Where process rewards go: summed at the end, or placed at their (turn, token)."""


class EnvSection(Choice):
    deadline: float = 60.0
    """Seconds for one call."""
    max_turns: int = 8
    concurrency: int = 16
    """Episodes open at once, for environments that run in worker processes."""


class ModelSection(ComponentConfig):
    model: str | None = None
    """Path or hub name."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    trainer: dict[str, Any] = Field(default_factory=dict)
    """Laid over ``[trainer]`` for this role."""


class EvalSection(ComponentConfig):
    every: int | None = None
    """Steps; where absent: at the end only, if there is evaluation data."""
    at_start: bool = False
    samples: int = 1
    """Answers per prompt, for avg@k and pass@k."""
    temperature: float = 0.0
    """0 = greedy."""
    max_new_tokens: int | None = None
    pass_threshold: float = 1.0
    """An answer passes if its reward is at least this."""
    max_rows: int | None = None
    metric: str | None = None
    """Metric of the best checkpoint; where absent the first of pass@1 and loss that exists."""
    mode: Literal["auto", "max", "min"] = "auto"
    patience: int | None = None
    """Stop after this many evaluations without improvement."""


class CheckpointSection(ComponentConfig):
    every: int | None = None
    keep: int = 3
    save_best: bool = True
    export_every: int | None = None
    """Steps between Hugging Face exports to ``exports/step-N``; the final one is ``model/``."""
    save_rollouts: bool = True


def _with_options(cls: type[Choice], value: Any) -> Any:
    """``{use, a, b}`` -> ``{use, options: {a, b}}``, keeping the section's own fields."""
    if not isinstance(value, dict) or "options" in value:
        return value
    own = {k: v for k, v in value.items() if k in cls.model_fields}
    return {**own, "options": {k: v for k, v in value.items() if k not in cls.model_fields}}


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
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observer: tuple[Choice, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _split_options(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        single = {"algorithm": Choice, "rollout": Choice, "trainer": Choice, "generator": Choice, "launcher": Choice}
        data = dict(data)
        for key, section in {**single, "env": EnvSection}.items():
            if key in data:
                data[key] = _with_options(section, data[key])
        for key, section in {"reward": RewardSection, "observer": Choice}.items():
            if key in data:
                data[key] = [_with_options(section, v) for v in data[key]]
        return data
