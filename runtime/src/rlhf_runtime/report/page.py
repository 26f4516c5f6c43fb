"""One HTML file about runs, which opens without a network and without a server. It shows all samples of a small run,
and a selection of the samples of a large run."""

from __future__ import annotations

import datetime
import hashlib
import html
import itertools
import json
import math
import random
import re
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import rlhf
from rlhf.errors import ConfigError, RlhfError
from rlhf_hub.hub import hub_name, is_cached
from rlhf_hub.published import model_folder

from rlhf_runtime.checkpoint.atomic_files import replace_file
from rlhf_runtime.checkpoint.sample_table import read_columns
from rlhf_runtime.data.image_files import data_url, thumbnail
from rlhf_runtime.observe.sample_lines import shortened
from rlhf_runtime.output.run_directory import RunDirectory, step_files
from rlhf_runtime.output.run_folder import REPORT, is_report
from rlhf_runtime.report.recorded_samples import RecordedSample, message_text, recorded_steps, samples_with_values
from rlhf_runtime.report.run_facts import run_facts
from rlhf_runtime.report.run_record import RunRecord

MOST_PROBLEMS = 30


def report(runs: Sequence[Path], page: Path) -> None:
    """Write the page about ``runs``. After a crash the file is complete or absent.

    Raises ConfigError if a folder holds no run, or ``page`` is a file that is not such a page.
    """
    _write([RunRecord.read(run) for run in runs], page)


def _write(records: Sequence[RunRecord], page: Path) -> None:
    check_page(page)
    selection = ShownSamples(len(records))
    values: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        samples = selection.samples(record, number)
        values.append({**run_facts(record), "samples": samples})
        problems = list(dict.fromkeys(record.problems))
        rest = len(problems) - MOST_PROBLEMS
        values[-1]["problems"] = problems[:MOST_PROBLEMS] + ([f"{rest} further problems"] if rest > 0 else [])
    time = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    prompts = [{"text": text, "images": images} for text, images in selection.prompts]
    data = {"time": time, "version": rlhf.__version__, "prompts": prompts, "runs": values}
    data["images"] = selection.images
    title = ", ".join(run["name"] for run in values)
    text = _filled({"title": html.escape(title), "data": script_json(data)})
    replace_file(page, lambda file: file.write(text))


def check_page(page: Path) -> None:
    """Raises ConfigError if ``page`` cannot be written, or is a file that is not such a page."""
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"the page cannot be written to {page}: name a file in a folder that exists.")
    if page.exists() and not is_report(page):
        raise ConfigError(f"{page} exists and is not a report, so it is not overwritten. Name another file.")


def script_json(value: Any) -> bytes:
    """JSON that is safe in a ``<script>`` element: nothing in it ends the element or begins a comment. Lone surrogates,
    which models do sample, are escaped."""
    form: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    try:
        text = json.dumps(value, **form)
    except ValueError:
        text = json.dumps(_finite(value), **form)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    """``value``, with numbers that JSON cannot represent replaced by their names."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _filled(texts: dict[str, str | bytes]) -> bytes:
    """The page, with each ``{{name}}`` replaced: by a text, or by the file of that name."""
    assets = files(__package__).joinpath("assets")
    parts = re.split(r"\{\{([\w.-]+)\}\}", assets.joinpath("page.html").read_text(encoding="utf-8"))
    # Because of the brackets in the pattern, every second part is a name.
    for index in range(1, len(parts), 2):
        text = texts.get(parts[index])
        parts[index] = assets.joinpath(parts[index]).read_text(encoding="utf-8") if text is None else text
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def try_report(run: Path, note: Callable[[str], None]) -> Path | None:
    """Write ``report.html`` in the folder of a run that has ended. Because the run has ended, failures are only
    noted."""
    page = run / REPORT
    try:
        # rlhf.train still holds the folder if it wrote objects there, but the run in it has ended.
        _write([replace(RunRecord.read(run), is_held=False)], page)
    except Exception as error:
        note(f"{page} was not written: {type(error).__name__}: {error}")
        return None
    return page


T = TypeVar("T")
SAMPLES, TOKENS, CHARACTERS = 2000, 250_000, 6000
"""Limits: samples of all runs, tokens that are shown with their values, characters of one text."""
IMAGES, PIXELS = 300, 400
"""Limits: different images of all runs, and width or height of an image. The page shows only the size of further
images."""
STEPS, EVALUATIONS, ANSWERS = 2000, 8, 100
"""Limits: steps of a run from which samples are chosen, evaluations of a run, answers of an evaluation."""
SHARES = (0.2, 0.3)
"""Shares of the samples that are from the first and last step, and from prompts that occurred twice. The others are
drawn at random."""

NO_POLICY = (
    "The log-probs of the policy are not recorded, because nothing needed them before the update, which has one "
    "optimizer step. The log-probs of the generator are used instead. The metric policy/kl_generator is the mean "
    "divergence of the two; `rlhf doctor RUN` compares them token by token."
)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """A group in a file of a step."""

    step: int
    prompt: tuple[str, int]
    """Source and row."""
    rows: range
    """Its rows in the file."""


class ShownSamples:
    """The samples of several runs, as JSON values. A prompt is written once.

    Args:
        runs: number of runs.
    """

    def __init__(self, runs: int) -> None:
        self.prompts: dict[tuple[str, tuple[int, ...]], int] = {}
        """{(text of a prompt, numbers of its images): its number}."""
        self.images: list[str] = []
        """A ``data:`` URL of each image, by number. Empty: the image is not shown."""
        self._numbers: dict[str, int] = {}
        """{hash of an image: its number}."""
        self._max_samples, self._tokens = SAMPLES // runs, TOKENS // runs

    def samples(self, record: RunRecord, number: int) -> dict[str, Any]:
        """``samples`` of the run with this number; ``steps``: number of steps from which they are chosen, and of all
        steps with samples; ``total``: number of samples that these chosen steps were trained on; ``shown``: number of
        them that are returned; ``with_tokens``: samples with tokens; ``texts`` of tokens by id; ``note`` about the
        numbers of tokens."""
        steps = recorded_steps(record.path)
        groups = recorded_groups(record, spread(steps, STEPS))
        rows: defaultdict[int, set[int]] = defaultdict(set)
        for group in chosen(groups, self._max_samples):
            rows[group.step].update(group.rows)
        files = [(step, "training", RunDirectory.rollouts_of(record.path, step), rows[step]) for step in sorted(rows)]
        evaluations = spread(step_files(record.path / "evaluations"), EVALUATIONS)
        answers = [(step, "evaluation", path, answer_rows(path)) for step, path in evaluations]
        # A large run has more tokens than can be shown: the first and last files come first, the others in any order.
        middle = [*files[1:-1], *answers[1:-1]]
        order = [*files[:1], *answers[:1], *files[1:][-1:], *answers[1:][-1:]]
        order += random.Random(0).sample(middle, len(middle))
        left = self._tokens
        samples: list[dict[str, Any]] = []
        for step, kind, path, numbers in order:
            try:
                for sample, line in samples_with_values(path, step, numbers):
                    count = sample.length if sample.length <= left else 0
                    left -= count
                    samples.append({"run": number, "kind": kind, **self._values(sample, line, with_tokens=count > 0)})
            except RlhfError as error:
                record.problems.append(str(error))
        ids = {token for sample in samples for turn in sample["turns"] for token in turn.get("ids", ())}
        values = [sample["values"].keys() for sample in samples if "values" in sample]
        return {
            "note": NO_POLICY if values and not any("policy/logprobs" in names for names in values) else "",
            "samples": sorted(samples, key=lambda s: (s["kind"] == "evaluation", s["step"], s["group"], s["sample"])),
            "total": sum(len(group.rows) for group in groups),
            "shown": sum(map(len, rows.values())),
            "steps": [len(spread(steps, STEPS)), len(steps)],
            "with_tokens": sum(any("ids" in turn for turn in sample["turns"]) for sample in samples),
            "texts": token_texts(record, sorted(ids)) if ids else {},
        }

    def _values(self, sample: RecordedSample, line: Mapping[str, Any], with_tokens: bool) -> dict[str, Any]:
        of_tokens = {name: _short(values) for name, values in (line.get("token_values") or {}).items()}
        advantages = [value for value in of_tokens.get("advantages", ()) if value is not None]
        opening = len(line["turns"]) - len(sample.turns)
        images = [[self._image_number(image["data"]) for image in turn.get("images") or ()] for turn in line["turns"]]
        sampled = (turn for turn in line["turns"] if turn["sampled"])
        turns = []
        for turn, numbers in zip(sample.turns, images[opening:], strict=True):
            entry = {
                "speaker": turn.speaker,
                "tokens": turn.tokens,
                "text": _cut(message_text(turn.messages or turn.text)),
            }
            entry |= {name: n for name, n in (("reward", turn.reward), ("score", turn.score)) if n is not None}
            entry |= {"images": numbers} if numbers else {}
            tokens = next(sampled) if turn.speaker == "policy" else None
            if tokens is not None and with_tokens:
                entry["ids"] = [int(token) for token in tokens["ids"]]
                entry |= {"logprobs": _short(tokens["logprobs"])} if tokens["logprobs"] is not None else {}
            turns.append(entry)
        prompt = (_cut(message_text(sample.prompt)), tuple(itertools.chain(*images[:opening])))
        values = {
            "step": sample.step, "group": sample.group, "sample": sample.sample, "source": sample.source,
            "row": sample.row, "prompt": self.prompts.setdefault(prompt, len(self.prompts)), "turns": turns,
            "reward": sample.reward, "rewards": sample.rewards, "status": sample.status, "length": sample.length,
        }  # fmt: skip
        extras = {
            "agent": sample.agent, "from_data": sample.is_demonstration or None, "error": _cut(sample.error),
            "info": sample.info, "values": of_tokens if with_tokens else {},
            "findings": {name: _cut(_words(finding)) for name, finding in sample.findings.items()},
            "advantage": sum(advantages) / len(advantages) if advantages else None,
        }  # fmt: skip
        return {**values, **{name: value for name, value in extras.items() if value not in ({}, "", None)}}

    def _image_number(self, data: str) -> int:
        """The number of an image, which is in base64. Samples of a prompt have the same images, so each image is kept
        once."""
        number = self._numbers.setdefault(hashlib.sha256(data.encode()).hexdigest(), len(self.images))
        if number == len(self.images):
            is_shown = number < IMAGES
            self.images.append(data_url(thumbnail(b64decode(data), PIXELS)) if is_shown else "")
        return number


def recorded_groups(record: RunRecord, steps: Sequence[int]) -> list[RecordedGroup]:
    """The groups of these steps."""
    groups: list[RecordedGroup] = []
    for step in steps:
        try:
            columns = read_columns(RunDirectory.rollouts_of(record.path, step), ["group", "source", "row", "sample"])
        except RlhfError as error:
            record.problems.append(str(error))
            continue
        numbers = columns["group"]
        starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
        for first, last in itertools.pairwise([*starts, len(numbers)]):  # a step without samples has no groups
            if columns["sample"][first] is not None:
                prompt = (str(columns["source"][first]), columns["row"][first])
                groups.append(RecordedGroup(step, prompt, range(first, last)))
    return groups


def chosen(groups: Sequence[RecordedGroup], limit: int) -> list[RecordedGroup]:
    """All groups, or groups with about ``limit`` samples (:data:`SHARES`). The choice is deterministic."""
    if sum(len(group.rows) for group in groups) <= limit:
        return list(groups)
    shuffled = random.Random(0).sample(groups, len(groups))
    by_prompt: defaultdict[tuple[str, int], list[RecordedGroup]] = defaultdict(list)
    for group in groups:
        by_prompt[group.prompt].append(group)
    histories = sorted(by_prompt.values(), key=lambda history: history[0].step - history[-1].step)
    ends = [group for group in shuffled if group.step in (groups[0].step, groups[-1].step)]
    pairs = [
        group for history in histories if history[0].step != history[-1].step for group in (history[0], history[-1])
    ]
    result: dict[RecordedGroup, None] = {}
    left = limit
    for part, share in zip((ends, pairs, shuffled), (*SHARES, 1.0), strict=True):
        quota = min(left, int(share * limit))
        for group in part:
            if group not in result and len(group.rows) <= quota:
                result[group] = None
                quota -= len(group.rows)
                left -= len(group.rows)
    # A group with more samples than the limit is still shown whole.
    return list(result) or [groups[-1]]


def answer_rows(path: Path) -> set[int]:
    """About :data:`ANSWERS` lines of a file of evaluations: all answers to some prompts of each source."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError:  # reading the answers reports the error
        return set()
    groups = [line.partition(b",")[0] for line in lines]  # a line begins with the number of its group
    starts = [number for number, group in enumerate(groups) if number == 0 or group != groups[number - 1]]
    prompts = list(itertools.pairwise([*starts, len(lines)])) if lines else []
    spans = spread(prompts, max(1, ANSWERS * len(prompts) // max(1, len(lines))))
    return {line for first, last in spans for line in range(first, last)}


def spread(values: Sequence[T], limit: int) -> list[T]:
    """At most ``limit`` of the values, from the first to the last."""
    count = min(len(values), limit)
    return [values[round(i * (len(values) - 1) / max(1, count - 1))] for i in range(count)]


def token_texts(record: RunRecord, ids: Sequence[int]) -> dict[int, str]:
    """The text of each token, by the ``tokenizer.json`` of the run's model; empty if it cannot be read, which is one
    of the record's problems. Nothing is looked up on a hub, and no code of a model runs."""
    from tokenizers import Tokenizer

    folders = [record.path / "model", Path(record.model).expanduser()]
    commits = record.start.get("hub")
    if (repo := hub_name(record.model)) and isinstance(commits, Mapping):
        pinned = hub_name(f"{repo.name}@{commits.get(f'model {repo}')}")
        folders += [Path(model_folder(str(pinned)))] if pinned and is_cached("model", pinned) else []
    file = next((path for folder in folders if (path := folder / "tokenizer.json").is_file()), None)
    problem = f"{record.model!r} has no tokenizer.json here"
    try:
        if file is not None:
            tokenizer = Tokenizer.from_file(str(file))
            prefix = tokenizer.decode(ids[:1], skip_special_tokens=False)  # a first token may lose its space
            pairs = tokenizer.decode_batch([[ids[0], token] for token in ids], skip_special_tokens=False)
            return {token: pair.removeprefix(prefix) for token, pair in zip(ids, pairs, strict=True)}
    except Exception as error:  # the library raises errors without a specific class
        problem = f"{file}: {error}"
    record.problems.append(f"tokens are shown by their ids: {problem}")
    return {}


def _words(finding: Mapping[str, Any]) -> str:
    return "; ".join(f"{key} {value}" for key, value in finding.items())


def _cut(text: str) -> str:
    return shortened(text, CHARACTERS)


def _short(values: Iterable[float]) -> list[float | None]:
    """Values with seven digits, the precision of float32; None for values that are not finite."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]
