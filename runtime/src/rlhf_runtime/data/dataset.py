"""The data of a run: rows of the sources in their order, encoded by the template, checked against length limits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from threading import Event, Thread
from typing import Any

from rlhf.errors import DataError
from rlhf.interfaces import Curriculum
from rlhf.types import DataForm, Row
from rlhf.types.examples import Example
from rlhf_hub.hub import Commits

from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.image_tokens import ImageTokens
from rlhf_runtime.data.loading import load_source
from rlhf_runtime.data.ranked_pairs import all_pairs
from rlhf_runtime.data.row_images import NO_IMAGES, has_images
from rlhf_runtime.data.row_order import CurriculumOrder, RowOrder, UsableRows
from rlhf_runtime.data.row_rules import RowVerdict, check_example, check_labels, check_prompt
from rlhf_runtime.data.source_layouts import set_layouts
from rlhf_runtime.data.sources import Source
from rlhf_runtime.data.template import Template

_END_TOKEN_FORMS: tuple[DataForm, ...] = ("demonstrations", "pairs", "labels")
"""Forms whose answers have an end token."""


class TrainData:
    """Rows for training in a resumable order, and rows for evaluation.

    Every returned row is usable and within the length limits. Depending on ``data.too_long`` and ``data.bad_rows``,
    other rows are refused with file and line, or left out and counted in :attr:`dropped` or :attr:`bad_rows`. Rows are
    never truncated.

    Args:
        answers: form ``prompts`` only: training rows, or the training rows of these sources, must also have an answer,
            which is read as in form ``demonstrations``.
        commits: the run's commits, for sources that are hub names; None: names are looked up now.
        images: the tokens of images, or a text that says why the run cannot have images.
        day: the time that a chat template reads as now. Default: the current time.

    Raises DataError (a source, columns that are not recognised, labels of one kind only) or ConfigError (the template).
    """

    def __init__(
        self,
        section: DataSection,
        tokenizer: Any,
        form: DataForm,
        seed: int,
        answers: bool | Sequence[str] = False,
        commits: Commits | None = None,
        images: ImageTokens | str = NO_IMAGES,
        day: datetime | None = None,
    ) -> None:
        commits = commits or Commits()
        self.section, self.form = section, form
        self.template = Template(tokenizer, section, images, day)
        self._train = [load_source(s, commits) for s in section.train]
        self._eval = [load_source(s, commits) for s in section.eval]
        sources = answers if not isinstance(answers, bool) else [s.name for s in self._train] if answers else ()
        self.answered = frozenset(sources)
        """Training sources whose rows must have an answer."""
        self.notes = set_layouts(self.sources, form, self.answered, section, self.template)
        """Messages on how the columns of sources were recognised, if the run file does not name them, and on end tokens
        that the chat template does not write."""
        if section.pairs == "all":
            sources_of_pairs = all_pairs([*self._train, *self._eval])
            self._train, self._eval = sources_of_pairs[: len(self._train)], sources_of_pairs[len(self._train) :]
        chat = self.template.chat
        self.end_note = chat.end_note if chat is not None and (form in _END_TOKEN_FORMS or answers) else ""
        """A note about an end token that the chat template does not write; empty if it does."""
        self.notes += filter(None, [self.end_note])
        if form == "labels" and self._train:
            columns = [s.layout.columns["label"] for s in self._train if s.layout is not None]
            check_labels(self._train, columns, section.bad_rows == "drop")
        self.order = RowOrder(self._train, seed, section.shuffle)
        self.curriculum: CurriculumOrder | None = None
        """The same object as :attr:`order`, if a curriculum chooses the rows."""
        self.dropped = 0
        """Number of training rows left out so far because they are too long."""
        self.bad_rows = 0
        """Number of training rows left out so far because they cannot be trained on."""
        self.eval_dropped = self.eval_bad_rows = 0
        self._held_out: list[Row] | None = None
        self._verdict = RowVerdict()
        self._examples: dict[tuple[str, int], Example] = {}

    @property
    def sources(self) -> dict[str, list[Source]]:
        """``train`` and ``eval``, each source with its layout."""
        return {"train": self._train, "eval": self._eval}

    @property
    def eval_notes(self) -> list[str]:
        """:attr:`notes` without those on training rows, for commands whose rows are both."""
        return [note for note in self.notes if not note.startswith("data.train ")]

    @cached_property
    def has_images(self) -> bool:
        """Whether the run may have images and a row of a source has one, or the source has a column of images."""
        return self.template.images.limit > 0 and any(map(has_images, (*self._train, *self._eval)))

    def fingerprints(self) -> dict[str, dict[str, dict[str, Any]]]:
        """{``train`` or ``eval``: {source: number of rows and SHA-256 of the content}}, for the manifest."""
        return {
            key: {source.name: {"rows": len(source), "fingerprint": source.fingerprint} for source in sources}
            for key, sources in self.sources.items()
        }

    @property
    def rows_per_epoch(self) -> int:
        return self.order.rows_per_epoch

    @property
    def epoch(self) -> float:
        return self.order.epoch

    def choose_by(self, curriculum: Curriculum, total_steps: int) -> None:
        """Let a curriculum choose the rows. If unusable rows are left out, every row is checked here, because the
        curriculum gets usable rows only.

        Raises DataError: a row is not usable and such rows are not left out, or no row is usable. Also raises the
        errors of the curriculum if the data does not fit it.
        """
        rows = UsableRows(self._train, self._usable(), self.order.seed)
        self.order = self.curriculum = CurriculumOrder(self.order, curriculum, rows, total_steps)

    def take(self, n: int, step: int = 0) -> list[Row]:
        """The next ``n`` usable rows.

        Args:
            step: the step, counted from 0, that trains on the batch of these rows. Only a curriculum reads it.

        Raises DataError: a row cannot be encoded or is too long (``too_long = "error"``), with its file and line; or no
        row of a whole pass over the data (or over a source with a probability) is usable. Raises PluginError: a
        curriculum chose rows that it may not choose.
        """
        rows: list[Row] = []
        self._examples = {}
        if self.curriculum is not None:
            rows = self.curriculum.choose(n, step)
            for row in rows:
                self._fits(row, self._train)  # raises if it does not
            return rows
        while len(rows) < n:
            row, misses = self.order.take(1)[0], 0
            while not self._fits(row, self._train):
                self.dropped += self._verdict.kind == "too_long"
                self.bad_rows += self._verdict.kind == "bad_rows"
                misses += 1
                # So many draws include a whole pass, even if the first is in the middle of one.
                if misses >= 2 * self.order.rows_of_pass(row):
                    raise self._nothing_left(row, misses, self._verdict)
                row = self.order.take_instead(row)
            rows.append(row)
        return rows

    def examples(self, rows: Sequence[Row]) -> list[Example]:
        """Rows of this data as tokens with their masks (offline forms)."""
        examples_of_rows = [self._examples.get((r.source, r.index)) for r in rows]
        return [
            e if e is not None and e.row is r else self.template.encode(self.form, r)
            for e, r in zip(examples_of_rows, rows, strict=True)
        ]

    def eval_rows(self, limit: int | None = None) -> list[Row]:
        """The usable evaluation rows, source by source, in the order of the files.

        Args:
            limit: the first rows of each source; None: all.

        Raises DataError: a row is not usable and such rows are not left out; or no row is usable.
        """
        if self._held_out is None:
            counts = Counter[str]()
            usable = list(self._fitting(self._eval, counts))
            self.eval_dropped, self.eval_bad_rows = counts["too_long"], counts["bad_rows"]
            self._examples = {}
            if self._eval and not usable:
                raise DataError(
                    f"no row of data.eval is left to evaluate on: {self.eval_dropped} are too long and "
                    f"{self.eval_bad_rows} are bad. The last one: {self._verdict.text}"
                )
            self._held_out = usable
        of_sources = itertools.groupby(self._held_out, key=lambda row: row.source)
        return [row for _, rows in of_sources for row in itertools.islice(rows, limit)]

    def judge(self, row: Row, answered: bool = False) -> RowVerdict:
        """Whether a row can be used, and its tokens. Changes no counter.

        Args:
            answered: form ``prompts``: the row's answer must be usable too.
        """
        template, section = self.template, self.section
        try:
            if self.form == "prompts":
                tokens = len(template.encode_prompt(row).ids)
                long = check_prompt(tokens, section)
                if answered and not long:
                    example = template.encode_demonstration(row)
                    long, tokens = check_example(example, section), len(example.sequences[0].ids)
                    template.answer_span(row, example.sequences[0])
                return RowVerdict("too_long" if long else "", long, tokens=tokens)
            example = template.encode(self.form, row)
            long = check_example(example, section)
        except DataError as error:
            return RowVerdict("bad_rows", str(error), error=error)
        return RowVerdict("too_long" if long else "", long, example, tokens=max(len(s.ids) for s in example.sequences))

    def judged(self) -> Iterator[tuple[Row, RowVerdict]]:
        """The training rows in the order of a run, without an end, those among them that are not used too. Changes no
        counter."""
        order = RowOrder(self._train, self.order.seed, self.order.shuffle)
        row = order.take(1)[0]
        while True:
            verdict = self.judge(row, row.source in self.answered)
            yield row, verdict
            row = order.take_instead(row) if verdict.kind else order.take(1)[0]

    def check(self, rows: int, stopped: Callable[[], bool] = lambda: False) -> str:
        """Check the first ``rows`` training rows of a run, in its order, without taking or counting them. Returns a
        note on the rows that will be left out; empty if no row will be.

        Args:
            stopped: called before each row; True ends the check.

        Raises DataError: a row would be refused by :meth:`take`, or no row is usable.
        """
        counts, first, checked, misses = Counter[str](), "", 0, 0
        judged = self.judged()
        while checked < rows or (rows and checked == counts.total()):  # at least until a row is usable
            if stopped():
                break
            row, verdict = next(judged)
            self._require_wanted(row, self._train, verdict)
            checked += 1
            misses = misses + 1 if verdict.kind else 0
            if verdict.kind:
                counts[verdict.kind] += 1
                first = first or f"{self._source(self._train, row.source).location(row.index)}: {verdict.text}"
            if misses >= 2 * self.order.rows_of_pass(row):
                raise self._nothing_left(row, misses, verdict)
        if not counts:
            return ""
        reasons = ", ".join(f"{counts[kind]} {name}" for kind, name in _LEFT_OUT.items() if counts[kind])
        return (
            f"{counts.total()} of the first {checked} training rows are left out ({reasons}), e.g. "
            f"{first.rstrip('.')}. `rlhf data preview --check` names all of them."
        )

    def every_example(self, size: int) -> Iterator[list[Example]]:
        """All usable rows as tokens, in lists of ``size``: first the training rows, then the evaluation rows. Changes
        no counter."""
        for sources in (self._train, self._eval):
            fitting = self._fitting(sources, Counter())
            while part := list(itertools.islice(fitting, size)):
                examples = self.examples(part)
                self._examples = {}
                yield examples

    def row(self, source: str, index: int) -> Row:
        """The training row that a checkpoint names. Raises DataError if there is none."""
        train_source = self._source(self._train, source)
        if not 0 <= index < len(train_source):
            raise DataError(f"data source {source!r} has no row {index}; it has {len(train_source)}")
        return train_source[index]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.state_dict(), "dropped": self.dropped, "bad_rows": self.bad_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.order.load_state_dict(state["order"])
        self.dropped, self.bad_rows = int(state["dropped"]), int(state.get("bad_rows", 0))

    # -------------------------------------------------------------------------------- usable rows

    def _usable(self) -> Mapping[str, Sequence[int]]:
        """{source: indices of its usable rows}. Counts the others. Checks no row if no rows are to be left out."""
        if "drop" not in (self.section.too_long, self.section.bad_rows):
            return {source.name: range(len(source)) for source in self._train}
        usable: dict[str, list[int]] = {source.name: [] for source in self._train}
        counts = Counter[str]()
        for row in self._fitting(self._train, counts):
            usable[row.source].append(row.index)
            self._examples = {}
        self.dropped += counts["too_long"]
        self.bad_rows += counts["bad_rows"]
        if not any(usable.values()):
            raise DataError(f"no row of data.train is left to train on. The last one: {self._verdict.text}")
        return usable

    def _fitting(self, sources: Sequence[Source], counts: Counter[str]) -> Iterator[Row]:
        """The usable rows of sources, in order. The others are counted in ``counts``, by the option that leaves them
        out."""
        for row in (source[index] for source in sources for index in range(len(source))):
            if self._fits(row, sources):
                yield row
            else:
                counts[self._verdict.kind] += 1

    def _fits(self, row: Row, sources: Sequence[Source]) -> bool:
        """Whether a row can be used. Sets :attr:`_verdict`."""
        self._verdict = verdict = self.judge(row, sources is self._train and row.source in self.answered)
        if verdict.example is not None and not verdict.kind:
            self._examples[row.source, row.index] = verdict.example  # for `examples`: rows are tokenised once
        self._require_wanted(row, sources, verdict)
        return not verdict.kind

    def _nothing_left(self, row: Row, misses: int, verdict: RowVerdict) -> DataError:
        of_source = "" if self._source(self._train, row.source).probability is None else f" of {row.source!r}"
        return DataError(
            f"{misses} consecutive rows{of_source} are over the limits (data.max_tokens = {self.section.max_tokens}, "
            f"data.max_prompt_tokens = {self.section.max_prompt_tokens}) or cannot be learnt from, so no row"
            f"{of_source} is left to train on. The last one: {verdict.text}"
        )

    def _require_wanted(self, row: Row, sources: Sequence[Source], verdict: RowVerdict) -> None:
        """Raises DataError if a row cannot be used and such rows are not left out."""
        if verdict.kind and getattr(self.section, verdict.kind) == "error":
            advice = (
                'Shorten the row, raise the limit, or set data.too_long = "drop"' if verdict.kind == "too_long" else
                'Correct the row, or set data.bad_rows = "drop"'
            )  # fmt: skip
            location = self._source(sources, row.source).location(row.index)
            end = "" if verdict.text.endswith((".", "?")) else "."
            text = f"{location}: {verdict.text}{end} {advice} to drop and count such rows."
            raise DataError(text) from verdict.error

    @staticmethod
    def _source(sources: Sequence[Source], name: str) -> Source:
        for source in sources:
            if source.name == name:
                return source
        raise DataError(f"no data source {name!r}; the sources are {', '.join(s.name for s in sources)}")


_LEFT_OUT = {"too_long": "over the limits", "bad_rows": "with nothing to learn or malformed"}

CHECKED = 5_000
"""Number of training rows that are tokenised before the first step. This takes a few seconds, usually less than loading
the models."""


class RowCheck:
    """Finds rows that the run would refuse. It works in a thread while models load, beginning with :meth:`start`. No
    other code may use the data before :meth:`wait` or :meth:`stop` has returned, because a tokenizer is not
    thread-safe.

    The run file alone decides which rows are checked: the first :data:`CHECKED` rows that the run will take, in its
    order. Later rows are checked when they are taken. ``rlhf data preview --check`` checks all rows.

    Args:
        rows: number of training rows that the run takes.
    """

    def __init__(self, data: TrainData, rows: int) -> None:
        self._data, self._rows = data, min(rows, CHECKED, data.rows_per_epoch)
        self._stopped = Event()
        self._error: BaseException | None = None
        self._note = ""
        self._thread = Thread(target=self._run, name="row-check", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> str:
        """Wait until all rows are checked. Returns a note on rows that are left out, or an empty text. Raises DataError
        with file and line of the first row that is refused."""
        # A thread that was not started cannot be joined.
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._note

    def stop(self) -> None:
        """End the check, because the run has failed for another reason."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._note = self._data.check(self._rows, self._stopped.is_set)
        except BaseException as error:  # raised again in wait()
            self._error = error
