"""Scores answers in the data with the rewards of a run file: `rlhf score`. No policy is loaded."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, ConfigError, RewardError
from rlhf.plugins import Plugins
from rlhf.types import Group, RewardResult
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.checkpoint.atomic_files import replace_file
from rlhf_runtime.checkpoint.json_values import dumps, loads
from rlhf_runtime.checkpoint.saved_groups import group_lines
from rlhf_runtime.checks.parts import check_parts, column_problems, refuse
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.dataset import TrainData
from rlhf_runtime.data.dataset_answers import DatasetAnswers
from rlhf_runtime.data.image_tokens import image_tokens
from rlhf_runtime.data.sources import Source
from rlhf_runtime.jobs.scoring import place_rewards, start_scorer
from rlhf_runtime.observe.progress import phase
from rlhf_runtime.rewards.scoring import Scorer
from rlhf_runtime.setup.prepare import PlacedPlugins
from rlhf_runtime.setup.resume import content_of_models

TOTAL = ""
"""The name of the weighted sum of all rewards, in :attr:`ScoreTotals.sums`."""
_AT_ONCE = 64
"""Number of rows whose answers are scored together. They are written to the disk before the next rows."""


@dataclass(slots=True)
class ScoreTotals:
    """Counts and sums of the scored answers."""

    rows: int = 0
    answers: int = 0
    sums: dict[str, list[float]] = field(default_factory=dict)
    """{reward source, or :data:`TOTAL`: [sum, answers to which it applied]}."""
    left_out: Counter[str] = field(default_factory=Counter)

    def mean(self, name: str) -> float | None:
        total, count = self.sums.get(name, [0.0, 0])
        return total / count if count else None

    def add(self, groups: Sequence[Group]) -> None:
        self.rows += len(groups)
        for trajectory in (t for group in groups for t in group.trajectories):
            self.answers += 1
            values = {name: value_of(result) for name, result in trajectory.rewards.items()}
            if trajectory.reward is not None:
                values[TOTAL] = trajectory.reward
            for name, value in values.items():
                if value is not None:
                    total, count = self.sums.get(name, [0.0, 0])
                    self.sums[name] = [total + value, count + 1]


def value_of(result: RewardResult | None) -> float | None:
    """The value of a reward, including its steps; None if it did not apply, or failed."""
    return None if result is None else result.total


def score_answers(
    config: RunFile,
    plugins: Plugins,
    columns: Sequence[str],
    output: Path,
    *,
    force: bool,
    note: Callable[[str], None],
) -> ScoreTotals:
    """Score every answer of ``data.eval`` and write one line per answer to ``output``, in the format of
    `rlhf eval --save`.

    After a failure ``output`` does not exist (or is unchanged). The scores so far are kept in a file beside it, from
    which the same call continues.

    Args:
        columns: columns of the answers; if empty, they are found by name.
        force: replace ``output``, and start again.

    Raises ConfigError, PluginError, DataError, ModelError or RewardError, which say what to change.
    """
    plugins_of_run, data = prepare(config, plugins)
    for text in data.eval_notes:
        note(text)
    sources = data.sources["eval"]
    answers = DatasetAnswers(sources, columns, data.template, plugins_of_run.config.data)
    rows = first_rows(sources, config.eval.max_rows)
    total = len(rows)
    file = PartialFile(output, _facts(plugins_of_run, data, answers.columns))
    if force:
        file.discard()
    scores = ScoreTotals()
    for part in file.resume():
        scores = ScoreTotals(part["rows"], part["answers"], part["sums"], Counter(part["left_out"]))
    if scores.rows:
        note(f"continuing after {scores.rows} of {total} rows, from {file.partial}")
    with ExitStack() as closing:
        numbers = iter(rows[scores.rows :])
        # If all rows are scored and only the output is missing, no model is loaded.
        if scores.rows < total:
            main = MainThread()
            closing.callback(main.close)
            scorer = start_scorer(plugins_of_run, main, closing)
        count = closing.enter_context(phase("scoring answers"))
        while chunk := list(islice(numbers, _AT_ONCE)):
            groups = [answers.group(number, scores.left_out) for number in chunk]
            places = iter(range(scores.rows + 1, total))  # the last row counts when it is written

            def advance(places: Iterator[int] = places) -> None:
                count(next(places, total - 1), total)

            main.run(score_groups(scorer, groups, advance))
            _check(groups, file)
            scores.add(groups)
            lines = list(group_lines((g for g in groups if g.trajectories), data.template.prompt_of))
            counts = {"rows": scores.rows, "answers": scores.answers, "sums": scores.sums}
            file.add({**counts, "left_out": dict(scores.left_out), "lines": lines})
            count(scores.rows, total)
    file.publish()
    return scores


async def score_groups(scorer: Scorer, groups: Sequence[Group], on_end: Callable[[], None]) -> None:
    """Score all groups concurrently: a server or worker processes get all of them, and a model reads them together. The
    time for which a reward waits for a model does not count towards its deadline. As in a run, the samples of each
    agent are scored as a group of their own.

    Args:
        on_end: called after each group.
    """

    async def score(group: Group) -> None:
        for samples_of_agent in group.by_agent().values():
            await scorer.score(samples_of_agent)
        on_end()

    await asyncio.gather(*map(score, groups))


def _check(groups: Sequence[Group], file: PartialFile) -> None:
    """Raises RewardError for the first answer that could not be scored."""
    for trajectory in (t for group in groups for t in group.trajectories if t.status == "failed"):
        raise RewardError(
            f"answer {trajectory.index[1]} of row {trajectory.row.index} of {trajectory.row.source!r} could not be "
            f"scored: {trajectory.error}\nEarlier scores are kept in {file.partial}; run the same command to continue."
        )


def _facts(plugins_of_run: PlacedPlugins, rows: TrainData, columns: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The facts that must be equal for a second call to continue the file of the first."""
    config = plugins_of_run.config.model_dump(mode="json")
    data = {k: v for k, v in config["data"].items() if k not in ("train", "batch_size", "shuffle")}
    template = str(rows.template.tokenizer.chat_template)
    return {
        "data": data | {"fingerprints": [s.fingerprint for s in rows.sources["eval"]]},
        "answers": {name: list(entries) for name, entries in columns.items()},
        "rewards": [{k: v for k, v in r.items() if k not in ("deadline", "retries")} for r in config["reward"]],
        "models": {name: [spec.path, spec.dtype] for name, spec in plugins_of_run.specs.items()},
        "model files": content_of_models(plugins_of_run.specs),
        "tokenizer": config["policy"]["model"],
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "plugins": [r.resolved.manifest() for r in plugins_of_run.rewards],
        "seed": config["run"]["seed"],
    }


def prepare(config: RunFile, plugins: Plugins) -> tuple[PlacedPlugins, TrainData]:
    """Check everything that needs no model, and read the rows. The roles are those of the rewards."""
    plugins_of_run = place_rewards(config, plugins)
    policy = plugins_of_run.config.policy
    assert policy.model is not None  # place_rewards names one
    images = image_tokens(policy.model, policy.trust_remote_code)
    data = TrainData(
        plugins_of_run.config.data,
        plugins_of_run.tokenizer,
        "prompts",
        config.run.seed,
        commits=plugins_of_run.commits,
        images=images,
    )
    refuse(column_problems(plugins_of_run.rewards, data.sources["eval"], "eval"))
    if data.has_images:
        images_of = {name: plugins_of_run.spec(name, images=True).images for name in plugins_of_run.specs}
        specs = {name: replace(spec, images=images_of[name]) for name, spec in plugins_of_run.specs.items()}
        plugins_of_run = replace(plugins_of_run, specs=specs)
        check_parts(plugins_of_run, plugins_of_run.places, specs, is_local=True)
    return plugins_of_run, data


def first_rows(sources: Sequence[Source], limit: int | None) -> list[int]:
    """The numbers, counted over all sources, of the first rows of each."""
    starts = accumulate((len(source) for source in sources), initial=0)
    return [start + row for start, source in zip(starts, sources, strict=False) for row in range(len(source))[:limit]]


class PartialFile:
    """A file that is written in parts over a long time. It is complete or absent, and an interrupted job can continue
    it: ``for part in resume(): ...``, then ``add(part)`` until done, then ``publish()``. A part is a JSON object.

    Parts are appended to ``NAME.partial``, one line each, after a first line that describes the job's input. A process
    that dies loses at most the part that it was writing. Another process with the same input continues after the last
    complete part.

    Args:
        header: JSON values that describe the job's input. Parts of another process are used only if its values are
            equal.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, dict(header)
        self.partial = path.with_name(f"{path.name}.partial")
        self._size = 0

    def resume(self) -> Iterator[dict[str, Any]]:
        """Parts that exist already. An incomplete last part is removed. The caller must exhaust the iterator.

        Raises ConfigError if the parts were made from another input, naming the difference.
        """
        if not self.partial.is_file():
            self.add(self.header)
            return
        size = 0
        with self.partial.open("rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):
                    break
                part = loads(line.decode(), f"{self.partial}:{number + 1}")
                size += len(line)
                if number:
                    yield part
                elif differing := sorted(k for k in {*self.header, *part} if self.header.get(k) != part.get(k)):
                    raise ConfigError(
                        f"{self.partial} was started with different values of {', '.join(differing)}. Use the same "
                        "values to continue it, or remove it (--force)"
                    )
        # Else the next part would be appended to the incomplete line.
        os.truncate(self.partial, size)
        self._size = size
        if not size:
            self.add(self.header)

    def add(self, part: Mapping[str, Any]) -> None:
        """Append a part. The part is on the disk when this returns.

        Raises CheckpointError if the file cannot be written, or if another process has written to it.
        """
        if (self.partial.stat().st_size if self.partial.exists() else 0) != self._size:
            raise CheckpointError(
                f"another process writes to {self.partial}, for the same {self.path.name}. It continues, and this one "
                "ends here: write to another file."
            )
        with self._writing(self.partial), self.partial.open("ab") as file:
            file.write((dumps(part, self.partial.name) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
            self._size = file.tell()

    def publish(self) -> None:
        """Write the file: the texts in ``lines`` of every part, one per line. The parts are removed."""
        with self._writing(self.path):
            lines = (f"{text}\n".encode() for part in self.resume() for text in part["lines"])
            replace_file(self.path, lambda file: file.writelines(lines))
        self.discard()

    def discard(self) -> None:
        """Remove the parts."""
        self.partial.unlink(missing_ok=True)

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as cause:
            raise CheckpointError(
                f"{path} could not be written: {cause}. The complete parts are kept in {self.partial}: free some space "
                "and repeat the same call to continue."
            ) from cause
