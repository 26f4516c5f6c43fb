"""The lengths of sequences that a plan assumes: those of the tokenised rows, or else the limits of the run file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.errors import RlhfError
from rlhf.interfaces import Rollout
from rlhf_runtime.checks.run import RunPlugins
from rlhf_runtime.data.dataset import CHECKED

if TYPE_CHECKING:
    from rlhf_runtime.data.dataset import TrainData
    from rlhf_runtime.data.row_rules import RowVerdict


@dataclass(frozen=True, slots=True)
class Lengths:
    """Upper bounds, in tokens."""

    prompt: int
    """The longest prompt; for pairs, the prompt of the largest pair."""
    longest: int
    """The longest sequence."""
    unit: int
    """The longest unit: a sequence, or the two sequences of a pair."""
    source: str
    """Description of their origin."""
    measured: bool = False
    step: int | None = None
    """Tokens of the largest batch of offline rows, in which the prompt of a pair counts once; None: unknown."""
    sampled: bool = False
    """Whether the policy samples the text after the prompt."""
    held_out: int | None = None
    """Number of held-out rows; None: unknown."""
    held_out_prompt: int = 0
    """The longest held-out prompt."""
    held_out_longest: int = 0
    """The longest held-out prompt and its answer."""

    @property
    def answer(self) -> int:
        return self.longest - self.prompt

    def with_half_the_answer(self) -> Lengths:
        return replace(
            self,
            longest=self.longest - self.answer // 2,
            unit=self.unit - self.answer // 2,
            held_out_longest=self.held_out_longest - (self.held_out_longest - self.held_out_prompt) // 2,
        )

    def with_half_the_rows(self) -> Lengths:
        """Half the prompt if answers are sampled, else half of everything."""
        if self.sampled:
            saving = self.prompt // 2
            return replace(self, prompt=self.prompt - saving, longest=self.longest - saving, unit=self.unit - saving)
        return replace(self, prompt=self.prompt // 2, longest=self.longest // 2, unit=self.unit // 2, step=None)


def limits(run: RunPlugins, reason: str) -> Lengths:
    """The limits of the run file. For a prompt without a limit it is the room that ``max_new_tokens`` leaves, or half
    of all tokens for pairs and for several turns.

    Args:
        reason: why the rows are not read.
    """
    config, pairs = run.config, run.algorithm.data == "pairs"
    data = config.data
    longest = data.max_tokens
    if _one_turn(run) and data.max_prompt_tokens is not None:
        longest = min(longest, data.max_prompt_tokens + config.sampling.max_new_tokens)
    has_pairs = pairs or config.env is not None
    prompt = longest // 2 if has_pairs else max(0, longest - config.sampling.max_new_tokens)
    prompt = min(data.max_prompt_tokens or prompt, longest - 1) if run.online or pairs else 0
    option = f"data.max_tokens = {data.max_tokens}"
    if data.max_prompt_tokens is not None:
        option += f", data.max_prompt_tokens = {data.max_prompt_tokens}"
    source = f"rows as long as {option} allows, because {reason}"
    return Lengths(prompt, longest, longest * (2 if pairs else 1), source, sampled=run.online)


def read_lengths(run: RunPlugins) -> Lengths:
    """The lengths of the first rows of the run, and of the held-out rows. If they cannot be read: :func:`limits`."""
    config = run.config
    sources = [*config.data.train, *config.data.eval]
    if not config.data.train:
        return limits(run, "there are no rows")
    if absent := [source.path for source in sources if not Path(source.path).exists()]:
        return limits(run, f"{absent[0]} is not a file on this machine")
    if config.data.images is not None or config.data.max_images:
        return limits(run, "the run has images")
    try:
        return _measured(run)
    except RlhfError as error:  # the run itself reports it better
        return limits(run, f"they cannot be read ({' '.join(str(error).split()).rstrip('.')})")


def _measured(run: RunPlugins) -> Lengths:
    from rlhf_runtime.data.dataset import TrainData
    from rlhf_runtime.data.tokenizer import load_tokenizer

    config, form = run.config, run.algorithm.data
    tokenizer = load_tokenizer(run.model("policy"), run.section("policy").trust_remote_code)
    data = TrainData(config.data, tokenizer, form, config.run.seed, run.algorithm.needs().answered, run.commits)
    tools = _tokens_of_tools(data, run.rollout) if run.online and run.rollout is not None else 0

    def sizes(verdicts: Iterable[RowVerdict], limit: int | None = None) -> list[tuple[int, int, int]]:
        """(tokens of the unit, of its prompt, of its longest sequence) of each of the first ``limit`` usable rows."""
        lengths: list[tuple[int, int, int]] = []
        for verdict in itertools.islice(verdicts, CHECKED):
            if verdict.kind:
                continue  # refused or left out
            sequences = [] if verdict.example is None else verdict.example.sequences
            unit = sum(len(s.ids) for s in sequences) or verdict.tokens
            prompt = min((s.loss_mask.index(True) for s in sequences), default=verdict.tokens)
            lengths.append((unit + tools, prompt + tools, verdict.tokens + tools))
            if len(lengths) == limit:
                break
        return lengths

    total = data.rows_per_epoch
    limit = _rows_of_steps(run, total)
    verdicts = (verdict for _, verdict in data.judged())
    train = sizes(verdicts if _has_probabilities(run) else itertools.islice(verdicts, total), limit)
    held_out = [
        size
        for source in data.sources["eval"]
        for size in sizes((data.judge(source[i]) for i in range(len(source))), config.eval.max_rows)
    ]
    if not train:
        return limits(run, "no row is usable")
    max_tokens, new = config.data.max_tokens, config.sampling.max_new_tokens
    if len(train) == limit:
        scope = f"the {limit} rows of the run's steps"
    elif _has_probabilities(run):
        scope = f"the first {len(train)} rows of the run"
    else:
        scope = f"{len(train)} rows" if total <= CHECKED else f"the first {CHECKED} of {total} rows"
    held_out_prompt = max((p for _, p, _ in held_out), default=0)
    held_out_longest = min(max_tokens, held_out_prompt + (config.eval.max_new_tokens or new)) if held_out else 0
    unit, prompt, _ = max(train)
    longest = max(tokens for _, _, tokens in train)
    if run.online:
        prompt = longest
        longest = unit = min(max_tokens, prompt + new) if _one_turn(run) else max_tokens
    elif form == "labels":  # an algorithm may put a prompt before the answer of another row
        longest = unit = min(max_tokens, max(p for _, p, _ in train) + max(tokens - p for _, p, tokens in train))
    step = None
    if form not in ("prompts", "labels"):
        computed, size = [unit - prompt * (form == "pairs") for unit, prompt, _ in train], config.data.batch_size
        step = max(sum(computed[i : i + size]) for i in range(0, len(computed), size))
    text = f"prompts of {prompt} tokens" if run.online else f"rows of {longest} tokens"
    if tools:
        text += f" with {tools} of tools"
    return Lengths(
        prompt,
        longest,
        unit,
        f"{text}, the longest of {scope}",
        measured=True,
        step=step,
        sampled=run.online,
        held_out=len(held_out),
        held_out_prompt=held_out_prompt,
        held_out_longest=held_out_longest,
    )


def _tokens_of_tools(data: TrainData, rollout: Rollout) -> int:
    """Number of tokens that a rollout's tools add to the first prompt."""
    if not rollout.needs_messages:
        return 0
    data.template.shows_tools = False
    tools, source = rollout.tools(), data.sources["train"][0]
    if not tools or not len(source):
        return 0
    messages = data.template.prompt_messages(source[0])
    prompt = data.template.messages.encode(messages)
    extended = data.template.messages.encode(messages, tools)
    return len(extended.ids) - len(prompt.ids)


def _has_probabilities(run: RunPlugins) -> bool:
    """Whether sources have probabilities. Then a pass over the data has some rows twice and lacks others."""
    return any(source.probability is not None for source in run.config.data.train)


def _rows_of_steps(run: RunPlugins, rows_per_epoch: int) -> int | None:
    """Number of rows that the steps of the run use; None: the run uses whole passes, or maybe other rows than the
    first."""
    from rlhf_runtime.setup.prepare import total_steps

    config = run.config
    stream = config.stream
    replaced = stream.filter is not None or stream.on_failed_sample == "drop_group" or stream.mode == "continuous"
    is_whole = config.run.steps is None and not _has_probabilities(run)
    if is_whole or config.curriculum is not None or replaced:
        return None
    return total_steps(config, rows_per_epoch) * config.data.batch_size


def _one_turn(run: RunPlugins) -> bool:
    """Whether a sample is a prompt and one answer."""
    rollout = run.rollout
    return run.online and run.config.env is None and (rollout is None or not rollout.needs_messages)
