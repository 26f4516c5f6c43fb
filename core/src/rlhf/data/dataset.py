"""The data of a run: sources in their order, through the template, within the length limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.config_errors import raise_problems
from rlhf.data.order import RowOrder
from rlhf.data.rows import Example
from rlhf.data.sources import Source, load_source
from rlhf.data.template import Template
from rlhf.errors import DataError, did_you_mean
from rlhf.runfile import DataSection
from rlhf.types import DataForm, Row


class TrainData:
    """Rows for training in a resumable order, and rows for evaluation.

    Every row handed out fits: a longer one is refused with its file and line, or left out and counted in
    :attr:`dropped`, as ``data.too_long`` says; nothing is ever cut.

    Raises DataError (a source, a missing column) or ConfigError (the template).
    """

    def __init__(self, section: DataSection, tokenizer: Any, form: DataForm, seed: int) -> None:
        self.section, self.form = section, form
        self.template = Template(tokenizer, section)
        self._train = [load_source(s) for s in section.train]
        self._eval = [load_source(s) for s in section.eval]
        raise_problems(
            "the data lacks columns",
            [*self._lacking("train", self._train), *self._lacking("eval", self._eval)],
            DataError,
        )
        self.order = RowOrder(self._train, seed, section.shuffle)
        self.dropped = 0
        """Training rows left out so far as too long."""
        self.eval_dropped = 0
        self._examples: dict[tuple[str, int], Example] = {}

    @property
    def rows_per_epoch(self) -> int:
        return self.order.rows_per_epoch

    @property
    def epoch(self) -> float:
        return self.order.epoch

    def take(self, n: int) -> list[Row]:
        """The next ``n`` rows that fit.

        Raises DataError: a row that cannot be encoded or is too long (``too_long = "error"``), with its file and
        line; or a whole pass over the data in which no row fits.
        """
        rows: list[Row] = []
        self._examples = {}
        misses = 0
        while len(rows) < n:
            row = self.order.take(1)[0]
            if self._fits(row, self._train):
                rows.append(row)
                misses = 0
                continue
            self.dropped += 1
            misses += 1
            if misses >= 2 * self.rows_per_epoch:
                raise DataError(
                    f"{misses} rows in a row are over the limits (data.max_tokens = {self.section.max_tokens}, "
                    f"data.max_prompt_tokens = {self.section.max_prompt_tokens}): nothing is left to train on"
                )
        return rows

    def examples(self, rows: Sequence[Row]) -> list[Example]:
        """Rows of this data as tokens with their masks (offline forms)."""
        found = [self._examples.get((r.source, r.index)) for r in rows]
        return [e if e is not None and e.row is r else self._encode(r) for e, r in zip(found, rows, strict=True)]

    def eval_rows(self) -> list[Row]:
        """All evaluation rows that fit, source by source, in the order they are written."""
        rows = [source[i] for source in self._eval for i in range(len(source))]
        kept = [row for row in rows if self._fits(row, self._eval)]
        self.eval_dropped = len(rows) - len(kept)
        self._examples = {}
        return kept

    def every_example(self, size: int) -> Iterator[list[Example]]:
        """Every row that fits, of training and then of evaluation, as tokens, in parts of ``size``; counts nothing."""
        for sources in (self._train, self._eval):
            rows = (source[i] for source in sources for i in range(len(source)))
            fitting = (row for row in rows if self._fits(row, sources))
            while part := list(itertools.islice(fitting, size)):
                examples = self.examples(part)
                self._examples = {}
                yield examples

    def row(self, source: str, index: int) -> Row:
        """The training row that a checkpoint names."""
        return self._source(self._train, source)[index]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.state_dict(), "dropped": self.dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(state["order"])
        self.dropped = int(state["dropped"])

    # ------------------------------------------------------------------------------------- inside

    def _fits(self, row: Row, sources: Sequence[Source]) -> bool:
        where = self._source(sources, row.source).where(row.index)
        try:
            problem = self._too_long(row)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        if problem and self.section.too_long == "error":
            raise DataError(
                f'{where}: {problem}. Shorten the row, raise the limit, or set data.too_long = "drop" to leave such '
                "rows out (counted)."
            )
        return not problem

    def _too_long(self, row: Row) -> str:
        section = self.section
        if self.form == "prompts":
            prompt = len(self.template.encode_prompt(row).ids)
            if not prompt:
                raise DataError("the prompt is empty; at least one token is needed to continue from")
            if section.max_prompt_tokens is not None and prompt > section.max_prompt_tokens:
                return f"the prompt has {prompt} tokens, over data.max_prompt_tokens = {section.max_prompt_tokens}"
            if prompt >= section.max_tokens:
                return (
                    f"the prompt has {prompt} tokens; data.max_tokens = {section.max_tokens} leaves no room to answer"
                )
            return ""
        example = self._encode(row)
        self._examples[row.source, row.index] = example
        for sequence in example.sequences:
            if len(sequence.ids) < 2:
                raise DataError("the row is empty: it has no token that could be learnt from what precedes it")
            prompt = sequence.loss_mask.index(True) if True in sequence.loss_mask else len(sequence.ids)
            if section.max_prompt_tokens is not None and prompt > section.max_prompt_tokens:
                return f"the prompt has {prompt} tokens, over data.max_prompt_tokens = {section.max_prompt_tokens}"
            if len(sequence.ids) > section.max_tokens:
                return f"the row has {len(sequence.ids)} tokens, over data.max_tokens = {section.max_tokens}"
        return ""

    def _encode(self, row: Row) -> Example:
        template = self.template
        encode = {
            "demonstrations": template.encode_demonstration,
            "pairs": template.encode_pair,
            "labels": template.encode_label,
            "steps": template.encode_steps,
        }[self.form]
        return encode(row)

    def _lacking(self, key: str, sources: Sequence[Source]) -> list[str]:
        problems = []
        for source in sources:
            for column in self._required():
                if column not in source.columns:
                    field = next((k for k in _COLUMN_FIELDS if getattr(self.section, k) == column), "prompt")
                    problems.append(
                        f"data.{key} {source.name!r} ({source.section.path}) has no column {column!r}; columns "
                        f"present: {', '.join(source.columns)}.{did_you_mean(column, source.columns)} "
                        f"Name the right one with --data.{field}."
                    )
        return problems

    def _required(self) -> list[str]:
        section, plain = self.section, self.template.chat is None
        prompt = [] if section.input_template is not None else [section.prompt]
        if self.form == "prompts":
            return prompt
        if self.form == "pairs":
            margin = [] if section.margin is None else [section.margin]
            return [section.chosen, section.rejected, *margin, *(prompt if plain else ())]
        if self.form == "steps":
            return [*prompt, section.steps, section.step_labels]
        label = [section.label] if self.form == "labels" else []
        if section.messages is not None:
            return [section.messages, *label]
        return [*(() if plain and section.loss_on == "all" else prompt), section.response, *label]

    @staticmethod
    def _source(sources: Sequence[Source], name: str) -> Source:
        for source in sources:
            if source.name == name:
                return source
        raise DataError(f"no data source {name!r}; there are {', '.join(s.name for s in sources)}")


_COLUMN_FIELDS = (
    "messages", "prompt", "response", "chosen", "rejected", "margin", "label", "steps", "step_labels"
)  # fmt: skip
