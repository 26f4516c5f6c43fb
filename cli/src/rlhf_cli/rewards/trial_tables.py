"""The output of a trial of rewards: tables of text, in a terminal or as one self-contained HTML page."""

from __future__ import annotations

import html
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.cells import cell_len, set_cell_size
from rlhf.types import Group, Trajectory
from rlhf_runtime.rewards.scoring import RewardCall

from rlhf_cli.jobs.score_answers import value_of
from rlhf_cli.rewards.trial import Trial

BINS = 8
"""Number of bars of a histogram. A reward with at most this number of different values has one bar for each."""
BAR = 32
"""Characters of the longest bar."""
MAX_ROWS = 5
"""Rows of a table of examples."""
SCALED = 1e-9
"""Values whose difference is smaller than this, relative to their spread, count as equal."""


@dataclass(frozen=True, slots=True)
class TrialTable:
    """A table with a title. It contains unescaped texts of people and models."""

    title: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    notes: Sequence[str] = ()


def sections(trial: Trial) -> list[TrialTable]:
    """The findings, the most important ones first."""
    summary = _summary(trial)
    probes, cheats = _probes(trial)
    notes = [*_constant_notes(trial), *cheats, *(f"left out: {n} {reason}" for reason, n in trial.left_out.items())]
    parts = [
        TrialTable("Rewards", ("reward", "answers", "mean", "std", "min", "max", "none", "failed", "constant groups"),
                summary, notes),
        *(_distribution(trial, name) for name in trial.rewards),
        *_agreement(trial),
        probes,
        _slowest(trial),
        _failures(trial),
    ]  # fmt: skip
    return [part for part in parts if part.rows or part.notes]


def _answers(trial: Trial) -> Iterator[tuple[Group, Trajectory]]:
    return ((group, trajectory) for group in trial.groups for trajectory in group.trajectories)


def _values(trial: Trial, name: str) -> list[float]:
    values = (value_of(trajectory.rewards.get(name)) for _, trajectory in _answers(trial))
    return [value for value in values if value is not None]


def _summary(trial: Trial) -> list[tuple[str, ...]]:
    rows = []
    for name in trial.rewards:
        values, count = _values(trial, name), sum(1 for _ in _answers(trial))
        failed = sum(name not in trajectory.rewards for _, trajectory in _answers(trial))
        spread = statistics.pstdev(values) if values else None
        numbers = (statistics.fmean(values), spread, min(values), max(values)) if values else (None,) * 4
        constant, compared = _constant(trial, name)
        none = count - failed - len(values)
        rows.append(
            (name, str(len(values)), *map(_number, numbers), str(none), str(failed), f"{constant} of {compared}")
        )
    return rows


def _constant(trial: Trial, name: str) -> tuple[int, int]:
    """(groups in which all answers have one value, groups with several values)."""
    groups = [
        [v for t in of_agent.trajectories if (v := value_of(t.rewards.get(name))) is not None]
        for group in trial.groups
        for of_agent in group.by_agent().values()
    ]
    compared = [values for values in groups if len(values) > 1]
    return sum(min(values) == max(values) for values in compared), len(compared)


def _constant_notes(trial: Trial) -> list[str]:
    return [
        f"{name}: {constant} of {compared} groups have the same value for all answers, so comparing answers within a "
        "group gives no training signal"
        for name in trial.rewards
        for constant, compared in [_constant(trial, name)]
        if compared and 2 * constant > compared
    ]


def _distribution(trial: Trial, name: str) -> TrialTable:
    values = _values(trial, name)
    different = sorted(set(values))
    if len(different) <= BINS:
        bars = [(_number(value), values.count(value)) for value in different]
    else:
        low, width = different[0], (different[-1] - different[0]) / BINS
        numbers = Counter(min(BINS - 1, int((value - low) / width)) for value in values)
        bars = [(f"{_number(low + n * width)} to {_number(low + (n + 1) * width)}", numbers[n]) for n in range(BINS)]
    longest = max((count for _, count in bars), default=1)
    rows = [(label, str(count), "█" * math.ceil(BAR * count / longest)) for label, count in bars]
    return TrialTable(f"Distribution of {name}", ("value", "answers", ""), rows)


def _agreement(trial: Trial) -> Iterator[TrialTable]:
    """The correlation of every two rewards, and the answers on which they differ most."""
    pairs = []
    examples: list[tuple[float, tuple[str, ...]]] = []
    for first, second in combinations(trial.rewards, 2):
        pairs_of_scores = [
            (a, b, group, trajectory)
            for group, trajectory in _answers(trial)
            if (a := value_of(trajectory.rewards.get(first))) is not None
            and (b := value_of(trajectory.rewards.get(second))) is not None
        ]
        columns = [[a for a, *_ in pairs_of_scores], [b for _, b, *_ in pairs_of_scores]]
        spreads = [statistics.pstdev(column) if column else 0.0 for column in columns]
        if min(spreads) <= SCALED:
            pairs.append((first, second, str(len(pairs_of_scores)), "one of them is constant"))
            continue
        means = [statistics.fmean(column) for column in columns]
        scaled = [((a - means[0]) / spreads[0], (b - means[1]) / spreads[1]) for a, b, *_ in pairs_of_scores]
        pairs.append((first, second, str(len(pairs_of_scores)), f"{statistics.fmean(x * y for x, y in scaled):+.2f}"))
        for (x, y), (a, b, group, trajectory) in zip(scaled, pairs_of_scores, strict=True):
            text = (f"{first} {_number(a)}, {second} {_number(b)}", *_place(group, trajectory))
            examples.append((abs(x - y), text))
    yield TrialTable("Agreement", ("reward", "reward", "answers", "correlation"), pairs)
    examples.sort(key=lambda example: -example[0])
    rows = [text for distance, text in examples[:MAX_ROWS] if distance > 1]
    notes = ["compared by their distance from each reward's mean, in standard deviations of the reward"] if rows else []
    yield TrialTable("Answers on which rewards disagree most", ("values", "row", "answer"), rows, notes)


def _place(group: Group, trajectory: Trajectory) -> tuple[str, str]:
    return f"{group.row.source} {group.row.index}", trajectory.completion


def _probes(trial: Trial) -> tuple[TrialTable, list[str]]:
    """The rewards of answers that try to cheat, compared with the data's answers of the same rows, and messages about
    those that succeed."""
    answers = {(group.row.source, group.row.index): group for group in trial.groups}
    gains: defaultdict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for probe, names in trial.probes:
        group = answers[(probe.row.source, probe.row.index)]
        for reward in trial.rewards:
            values = [v for t in group.trajectories if (v := value_of(t.rewards.get(reward))) is not None]
            for name, trajectory in zip(names, probe.trajectories, strict=True):
                value = value_of(trajectory.rewards.get(reward))
                if value is not None and values:
                    gains[reward, name].append((value, statistics.fmean(values), max(values)))
    rows, notes = [], []
    for (reward, name), values_of_rows in gains.items():
        value, mean, _ = (statistics.fmean(column) for column in zip(*values_of_rows, strict=True))
        best = sum(value >= best for value, _, best in values_of_rows)
        pays = value > mean + SCALED
        rows.append(
            (reward, name, _number(value), _number(mean), f"{best} of {len(values_of_rows)}", "pays" if pays else "")
        )
        if pays:
            notes.append(f"{reward}: {name}: {_number(value)} on average, while the given answers get {_number(mean)}")
    columns = ("reward", "answer", "mean", "given answers", "as good as the best of its row", "")
    notes_on_truth = [
        f"the right answer is the column {trial.truth!r}" if trial.truth else "the right answer is not known"
    ]
    return TrialTable("Answers that try to cheat", columns, rows, notes_on_truth if rows else ()), notes


def _slowest(trial: Trial) -> TrialTable:
    calls = sorted(trial.calls, key=lambda call: -call.seconds)[:MAX_ROWS]
    rows = [(call.reward, f"{call.seconds:.3f}", *_samples(call)) for call in calls]
    return TrialTable("Slowest calls", ("reward", "seconds", "row", "answers", "first answer"), rows)


def _samples(call: RewardCall) -> tuple[str, str, str]:
    place, text = _place(call.group, call.group.trajectories[0])
    return place, str(len(call.group.trajectories)), text


def _failures(trial: Trial) -> TrialTable:
    """Calls that failed, with one example of each message."""
    failures: dict[tuple[str, bool, str], list[RewardCall]] = {}
    for call in trial.calls:
        if (message := next((r for r in call.results if isinstance(r, str)), None)) is not None:
            late = call.seconds >= trial.rewards[call.reward].deadline
            failures.setdefault((call.reward, late, message), []).append(call)
    rows = [
        (reward, "took too long" if late else "failed", str(len(calls)), *_samples(calls[0])[::2], message)
        for (reward, late, message), calls in sorted(failures.items(), key=lambda item: not item[0][1])
    ]
    expired = sum(len(calls) for (_, late, _), calls in failures.items() if late)
    failed = sum(map(len, failures.values())) - expired
    notes = [f"{expired} calls took longer than their deadline, {failed} failed for other reasons"] if rows else []
    columns = ("reward", "", "calls", "first row", "first answer", MESSAGE)
    return TrialTable("Calls without a result", columns, rows[: 2 * MAX_ROWS], notes)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


LONGEST = 60
"""Largest number of characters of a cell in a terminal. The page has whole texts."""
MESSAGE = "message"
"""The column whose cells are never cut: the cause of an error is often its last words."""
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
div { overflow-x: auto }
table { border-collapse: collapse }
th, td { border-bottom: 1px solid #8884; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
td { max-width: 40rem; overflow-wrap: anywhere; white-space: pre-wrap; font-variant-numeric: tabular-nums }
"""


def as_text(parts: Sequence[TrialTable]) -> str:
    return "\n".join(_table(part) for part in parts)


def as_page(title: str, parts: Sequence[TrialTable]) -> str:
    """A page of HTML. Every text is escaped, and the page may load nothing and run nothing."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>")
        if part.notes:
            body.append(f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in part.notes)}</ul>")
        if part.rows:
            head = "".join(f"<th>{html.escape(column)}</th>" for column in part.columns)
            rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in part.rows)
            body.append(f"<div><table><tr>{head}</tr>{rows}</table></div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _table(part: TrialTable) -> str:
    rows = [part.columns, *part.rows] if part.rows else []
    longest = [sys.maxsize if column == MESSAGE else LONGEST for column in part.columns]
    cells = [[_cell(cell, limit) for cell, limit in zip(row, longest, strict=True)] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(set_cell_size(c, w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([part.title, *(f"  - {note}" for note in part.notes), *(f"  {line}" for line in lines), ""])


def _cell(text: str, longest: int) -> str:
    """One line, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text.strip())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"
