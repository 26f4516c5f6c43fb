"""The section ``[data]`` of the run file: where rows come from, which columns they have, how they become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rlhf.interfaces.component import ComponentConfig
from rlhf.paths import PathText
from rlhf_hub.hub import hub_name

from rlhf_runtime.config.sections import Count, Share, unique


class SourceSection(ComponentConfig):
    path: PathText
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
    chat_template: PathText | None = None
    """A file with the chat template (Jinja) to use in place of the tokenizer's own; it goes with every export."""
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
