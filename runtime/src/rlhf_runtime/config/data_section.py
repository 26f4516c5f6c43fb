"""The section ``[data]`` of the run file: the sources of rows, their columns, and how rows become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from rlhf.fields import PathText
from rlhf.interfaces.component import ComponentConfig
from rlhf_hub.hub import hub_name

from rlhf_runtime.config.sections import Count, NameText, NotNegative, Share, unique


class SourceSection(ComponentConfig):
    path: PathText
    """A jsonl / json / csv / parquet / arrow file (``.gz`` allowed), a folder saved by ``datasets``, or a name on
    the hub: ``owner/name``, or ``owner/name@revision`` with a branch, tag or commit."""
    name: NameText = ""
    """Name in per-source metrics; if empty, the file's stem."""
    split: str = "train"
    """Split of a hub name or a saved folder."""
    subset: str | None = None
    """Configuration of a hub name."""
    probability: Share | None = None
    """Share of the rows that are used. Set it for all sources or for none. Without it, sources are concatenated."""
    max_rows: Count | None = None
    """Use only the first rows."""

    @property
    def label(self) -> str:
        """``name``, or the file's stem."""
        stem = self.path.rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].split(".")[0]
        dataset = hub_name(self.path)
        return self.name or (dataset.name.rsplit("/", 1)[-1] if dataset and "@" in self.path else stem) or self.path


class DataSection(ComponentConfig):
    train: tuple[SourceSection, ...] = ()
    """Sources of training rows; a text is the path of one source."""
    eval: tuple[SourceSection, ...] = ()
    """Sources of held-out rows. Each evaluation uses every row once."""
    batch_size: Count = 16
    """Prompts (online) or rows (offline) per step."""
    shuffle: bool = True
    """Shuffle the rows in every pass, from ``run.seed``; false: keep the order of the sources."""
    prompt: str | None = None
    """Column with the prompt: text, or a list of ``{role, content}`` messages. If this option and the columns below are
    not set, the columns ``prompt``, ``response``, ``chosen``, ... are used if a source has them. Otherwise common
    layouts are recognised."""
    response: str | None = None
    """Column with the answer (demonstrations, labels). ``messages``, if set, replaces it."""
    reasoning: str | None = None
    """Column with the reasoning before ``response``: text that the chat template renders and that is trained on with
    it. Null or empty if a row has none. Read only if set."""
    messages: str | None = None
    """Column with whole conversations (demonstrations, labels)."""
    chosen: str | None = None
    """Column with the better answer of a pair."""
    rejected: str | None = None
    """Column with the worse answer of a pair."""
    margin: str | None = None
    """Column with the margin of a pair: a number that says how much better the chosen answer is. Read only if set. If
    the column ranks several answers, the margin is the difference between the two."""
    preference: str | None = None
    """Column that says which of two answers is better, in a source that has several of them (PKU-SafeRLHF:
    ``better_response_id`` or ``safer_response_id``)."""
    pairs: Literal["extremes", "all"] = "extremes"
    """Pairs of a row with a list of ranked or scored answers: ``extremes``, the best and the worst; ``all``, every two
    answers with different ranks or scores. A pair counts as a row."""
    label: str | None = None
    """Column with the label of an answer: true or false, 1 or 0, ``+`` or ``-``. Default: ``label``."""
    steps: str | None = None
    """Column with the steps of a solution: a list of texts. Default: ``completions``."""
    step_labels: str | None = None
    """Column with a label for each step: as in ``label``, or the probability that the step is right (0 to 1). Or column
    with the index of the first wrong step, -1 if there is none. Default: ``labels``."""
    images: str | None = None
    """Column with the images of a row, one or a list: paths (relative to the data file), ``data:`` URLs, or bytes as
    ``datasets`` stores them. Read if the policy is an image-text model. Default: ``images``, or ``image``."""
    max_images: NotNegative | None = None
    """Largest number of images in a sequence, including those that an environment or a program adds. Rows with more are
    bad rows. 0: the run has no images, and the engines of an image-text model prepare for text only. Default: 8."""
    step_separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text after each step. A step ends at the token in which this text ends."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """``chat``: the tokenizer's chat template (an error if it has none); ``plain``: text without a template; ``auto``:
    ``chat`` if the tokenizer has a template, otherwise ``plain``."""
    chat_template: PathText | None = None
    """File with the chat template (Jinja) to use instead of the tokenizer's. Exported models contain it."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the chat template, e.g. ``enable_thinking = false``."""
    earlier_answers: Literal["template", "sampled"] = "template"
    """What happens in rollouts with an environment if the chat template changes an answer once a message follows (Qwen3
    drops its reasoning). ``template``: the run is refused. ``sampled``: the policy continues after the tokens that it
    sampled, a context that the template itself would not render."""
    system: str | None = None
    """System message before every prompt (chat), or text before every prompt (plain)."""
    input_template: str | None = None
    """Format string with column names, e.g. ``"Q: {question}\\nA: "``, that makes the prompt instead of a column; with
    a chat template, the user's message."""
    loss_on: Literal["completion", "assistant", "all"] = "completion"
    """Offline: train on the last answer, on all assistant turns, or on all tokens (continued pre-training)."""
    add_eos: bool = True
    """Plain only: end demonstrations with the end token."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, in tokens. Without it, only ``max_tokens`` limits prompts."""
    max_tokens: Count = 2048
    """Longest sequence, in tokens: prompt, observations and answers together."""
    too_long: Literal["error", "drop"] = "error"
    """Rows over the limits: ``error`` refuses them with file and line, ``drop`` omits and counts them. Rows are never
    truncated."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows that cannot be read or cannot be trained on (an empty answer, equal answers of a pair, an invalid label):
    ``error`` refuses them with file and line, ``drop`` omits and counts them."""

    @property
    def image_limit(self) -> int:
        """``max_images``, or its default."""
        return 8 if self.max_images is None else self.max_images

    @model_validator(mode="after")
    def _sources(self) -> DataSection:
        for key, sources in (("train", self.train), ("eval", self.eval)):
            unique([s.label for s in sources], f"data.{key}: two sources are named", "give one of them another `name`")
        if any(s.probability is not None for s in self.eval):
            raise ValueError("data.eval: probabilities are for training data; every evaluation row is used once")
        probabilities = [s.probability for s in self.train if s.probability is not None]
        if probabilities and len(probabilities) != len(self.train):
            labels = [s.label for s in self.train if s.probability is None]
            raise ValueError(f"data.train: give a probability for every source or for none; {labels} have none")
        if probabilities and abs(sum(probabilities) - 1) > 1e-6:
            raise ValueError(
                f"data.train: probabilities must sum to 1, got {probabilities}, which sum to {sum(probabilities):g}"
            )
        if self.max_prompt_tokens is not None and self.max_prompt_tokens >= self.max_tokens:
            raise ValueError(
                f"data.max_prompt_tokens = {self.max_prompt_tokens} leaves no room for an answer within "
                f"data.max_tokens = {self.max_tokens}"
            )
        return self
