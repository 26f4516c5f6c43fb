"""Whole runs with a curriculum: each visibly does what it says, and resumes to the same rows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks
from tests.runs import PROMPTS, Finished, Workshop, assert_same_run, merged
from tests.test_resume import KILLER, Runs

CHANCE = """
async def score(prompt, completion, row):
    return float(sum(map(ord, completion)) * 37 % 100 < 100 * row["chance"])
"""
"""Passes by chance, which depends on the answer's characters; never where the row says 0, always where it says 1."""


def rows_of(run: Finished) -> list[Counter[tuple[str, int]]]:
    """Of each step: how many groups each row has in what was trained on."""
    counts = []
    for name in run.rollouts():
        groups = {(line["group"], line["row"]["source"], line["row"]["index"]) for line in run.samples_of(name)}
        counts.append(Counter((source, index) for _, source, index in groups))
    return counts


def by_chance(shop: Workshop, **changes: Any) -> dict[str, Any]:
    """Rows 0 to 3 are never solved, 4 to 7 sometimes, 8 to 11 always."""
    rows = [{**row, "chance": (0.0, 0.5, 1.0)[n // 4], "level": 11 - n} for n, row in enumerate(PROMPTS)]
    base = {
        "data": {"train": str(shop.rows("chances.jsonl", rows))},
        "reward": [{"use": f"file:{shop.file('chance.py', CHANCE)}"}],
        "sampling": {"samples_per_prompt": 4, "max_new_tokens": 6},
    }
    return merged(base, changes)


def two_sources(shop: Workshop, **changes: Any) -> dict[str, Any]:
    """All answers to rows of ``solved`` pass, half of those to rows of ``open``."""
    sources = {"solved": 1.0, "open": 0.5}
    files = {name: shop.rows(f"{name}.jsonl", [{**row, "chance": c} for row in PROMPTS]) for name, c in sources.items()}
    return by_chance(shop, **merged({"data": {"train": [{"path": str(f)} for f in files.values()]}}, changes))


# ------------------------------------------------------------------------------------ what each does


def test_pass_rate_turns_to_rows_that_are_solved_sometimes(shop: Workshop) -> None:
    run = shop.train("rloo", "run", **by_chance(shop, curriculum={"use": "pass_rate"}, run={"steps": 12}))
    steps = rows_of(run)
    first, last = sum(steps[:3], Counter()), sum(steps[6:], Counter())
    assert len(first) >= 9, "most rows are seen once at first"
    sometimes = sum(n for (_, index), n in last.items() if 4 <= index < 8)
    assert sometimes / last.total() > 0.6, "of all rows a third"
    assert {index for _, index in last} - {4, 5, 6, 7}, "others are explored"
    lines = run.lines()
    assert lines[0]["curriculum/from_unseen"] == 1.0
    assert lines[-1]["curriculum/from_band"] >= 0.5
    assert lines[-1]["epoch"] == 12 * 4 / 12
    assert lines[-1]["reward/group_std"] > lines[0]["reward/group_std"]


def test_easy_to_hard_lets_harder_rows_in_step_by_step(shop: Workshop) -> None:
    section = {"use": "easy_to_hard", "column": "level", "start": 0.25, "until": 0.75}
    run = shop.train("rloo", "run", **by_chance(shop, curriculum=section, run={"steps": 4}, data={"batch_size": 3}))
    hardest = [max(11 - index for _, index in step) for step in rows_of(run)]
    allowed = [3, 6, 9, 12]
    assert [level < maximum for level, maximum in zip(hardest, allowed, strict=True)] == [True] * 4
    assert {index for _, index in rows_of(run)[0]} == {9, 10, 11}, "the easiest three, each once"
    assert sum(rows_of(run), Counter()).most_common(1)[0][1] == 1, "no row comes again before all came"
    assert [line["curriculum/share_allowed"] for line in run.lines()] == [n / 12 for n in allowed]


def test_adaptive_mixing_turns_to_the_source_that_teaches(shop: Workshop) -> None:
    section = {"use": "adaptive_mixing", "temperature": 0.2}
    run = shop.train("rloo", "run", **two_sources(shop, curriculum=section, run={"steps": 8}, data={"batch_size": 6}))
    lines = run.lines()
    assert lines[0]["curriculum/share/open"] == 0.5
    assert lines[-1]["curriculum/share/open"] > 0.9
    assert lines[-1]["curriculum/value/solved"] == 0.0
    last = sum(rows_of(run)[4:], Counter())
    assert sum(n for (source, _), n in last.items() if source == "open") / last.total() > 0.8


def test_adaptive_mixing_begins_at_the_probabilities(shop: Workshop) -> None:
    config = two_sources(shop, curriculum={"use": "adaptive_mixing", "min_share": 0.0}, run={"steps": 1})
    for source, probability in zip(config["data"]["train"], (0.75, 0.25), strict=True):
        source["probability"] = probability
    (line,) = shop.train("rloo", "run", **config).lines()
    assert line["curriculum/share/open"] == pytest.approx(0.25)


def test_an_offline_run_can_begin_with_the_easy_rows(shop: Workshop) -> None:
    """Where one row may come, the weights are those of a run on that row alone."""
    rows = [{**row, "level": 11 - n} for n, row in enumerate(PROMPTS)]
    section = {"use": "easy_to_hard", "column": "level", "start": 0.01, "until": 1.0}
    data = {"train": str(shop.rows("levels.jsonl", rows))}
    run = shop.train("sft", "run", data=data, curriculum=section, run={"steps": 1})
    single = shop.train("sft", "alone", data={"train": str(shop.rows("alone.jsonl", rows[-1:]))}, run={"steps": 1})
    default = shop.train("sft", "usual", data=data, run={"steps": 1})
    assert run.weights == single.weights != default.weights
    assert run.lines()[0]["curriculum/share_allowed"] == pytest.approx(1 / 12)


def test_rows_that_are_left_out_are_never_chosen(shop: Workshop) -> None:
    rows = [{**row, "prompt": row["prompt"] * (30 if n % 3 == 0 else 1)} for n, row in enumerate(PROMPTS)]
    data = {"train": str(shop.rows("long.jsonl", rows)), "max_prompt_tokens": 20, "too_long": "drop"}
    run = shop.train("rloo", "run", data=data, curriculum={"use": "pass_rate"})
    assert [line["data/dropped"] for line in run.lines()] == [4.0] * 3
    assert not {index for step in rows_of(run) for _, index in step} & {0, 3, 6, 9}
    assert run.lines()[-1]["epoch"] == 3 * 4 / 8, "of the rows that can be drawn"


# ------------------------------------------------------------------------------------------- resuming


@pytest.fixture
def runs(forks: Forks, shop: Workshop) -> Runs:
    return Runs(forks, shop)


CASES = {
    "pass_rate": ({"use": "pass_rate", "low": 0.1, "high": 0.9}, by_chance),
    "easy_to_hard": ({"use": "easy_to_hard", "column": "level", "until": 0.8}, by_chance),
    "adaptive_mixing": ({"use": "adaptive_mixing"}, two_sources),
}


STREAMS = {"staleness": {"staleness": 2}, "round": {"round": 2}}
KILLED = [
    ("adaptive_mixing", "staleness"),
    pytest.param("pass_rate", "round", marks=pytest.mark.full),
    pytest.param("easy_to_hard", "staleness", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("name", "stream"), KILLED)
def test_a_killed_run_chooses_the_same_rows(runs: Runs, name: str, stream: str) -> None:
    """Killed where batches are ready that the curriculum has not been told of; groups are filtered and refilled."""
    section, make = CASES[name]
    changes = make(
        runs.shop,
        curriculum=section,
        run={"steps": 7},
        stream={**STREAMS[stream], "filter": {"min_std": 0.0, "max_rounds": 2}},
        checkpoint={"every": 3},
        observer=[{"use": f"file:{runs.shop.file('killer.py', KILLER)}"}],
    )
    baseline = runs.end(runs.shop.config("rloo", "whole", **changes))
    assert baseline.code == 0, baseline.err
    broken = runs.shop.config("rloo", "broken", **changes)
    runs.die_at(broken, "rollouts 5")
    resumed = runs.resume(broken)
    assert "resumed after step 3" in resumed.err
    assert_same_run(resumed, baseline)
    assert sum(line["stream/filtered"] for line in baseline.lines()) > 0


def test_an_offline_run_resumes_to_the_same_rows(shop: Workshop) -> None:
    rows = [{**row, "level": n} for n, row in enumerate(PROMPTS)]
    changes = {
        "data": {"train": str(shop.rows("levels.jsonl", rows))},
        "curriculum": {"use": "easy_to_hard", "column": "level"},
        "run": {"steps": 6},
    }
    baseline = shop.train("sft", "whole", **changes)
    assert shop.train("sft", "broken", "--run.stop_after", "2", **changes).lines()[-1]["step"] == 2
    resumed = shop.train("sft", "broken", "--resume", **changes)
    assert_same_run(resumed, baseline)


def test_a_curriculum_is_part_of_the_run(shop: Workshop) -> None:
    changes = by_chance(shop, curriculum={"use": "pass_rate"}, run={"steps": 2})
    run = shop.train("rloo", "run", **changes)
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert ("curriculum", "pass_rate") in [(p["kind"], p["name"]) for p in manifest["starts"][0]["plugins"]]
    rerun = shop.command(
        "train", str(run.path / "config.toml"), "--run.output", str(shop.folder / "again"), output=shop.folder / "again"
    )
    assert rerun.code == 0, rerun.said
    assert rows_of(rerun) == rows_of(run)
    for curriculum, says in (
        ({"use": "pass_rate", "explore": 0.5}, "curriculum.explore: was 0.25, now 0.5"),
        ({"use": "easy_to_hard", "column": "level"}, "curriculum.use: was 'pass_rate', now 'easy_to_hard'"),
        (None, "curriculum.use: was 'pass_rate', now '(not set)'"),
    ):
        other = {**changes, "curriculum": curriculum, "run": {"steps": 4}}
        other = {key: value for key, value in other.items() if value is not None}
        failed = shop.run("rloo", "run", "--resume", **other)
        assert failed.code != 0
        assert "was saved with a different config" in failed.err
        assert says in failed.err, failed.err


def test_a_run_file_with_a_curriculum_can_be_evaluated(shop: Workshop) -> None:
    _, path = shop.arguments(shop.config("rloo", "run", **by_chance(shop, curriculum={"use": "pass_rate"})))
    done = shop.command("eval", path, "--data.eval", str(shop.folder / "chances.jsonl"))
    assert done.code == 0, done.said


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("algorithm", "options", "says"),
    [
        ("sft", {"use": "pass_rate"}, "by the scores of sampled answers, but sft learns from demonstrations"),
        ("rloo", {"use": "easy_to_hard", "column": "anser"}, "curriculum.column = 'anser': the data source 'data' has"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    shop: Workshop, algorithm: str, options: dict[str, Any], says: str
) -> None:
    failed = shop.run(algorithm, "run", "--dry-run", curriculum=options)
    assert failed.code != 0
    assert says in " ".join(failed.err.split()), failed.err
    assert not failed.path.exists()


BROKEN = """
from rlhf.interfaces import Curriculum


class Broken(Curriculum):
    '''Chooses wrongly at the second step.'''

    name = "broken"

    def setup(self, rows, seed, total_steps):
        pass

    def choose(self, n, step):
        return list(range(n)) if step == 0 else {CHOSEN}
"""


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ("[0]", "choose(4, 1) of curriculum 'broken' chose 1 rows instead of exactly 4"),
        ("1 / 0", "choose() of curriculum 'broken' raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_broken_curriculum_ends_the_run_with_its_name(shop: Workshop, chosen: str, says: str) -> None:
    """The step before is saved."""
    file = shop.file("broken.py", BROKEN.replace("{CHOSEN}", chosen))
    failed = shop.run("rloo", "run", curriculum={"use": f"file:{file}"})
    assert failed.code != 0
    assert says in failed.err
    assert failed.last_checkpoint.name == "step-000001"


def test_a_curriculum_can_be_named_by_flags(shop: Workshop) -> None:
    run = shop.train("rloo", "run", "--curriculum.use", "pass_rate", "--curriculum.explore", "1.0")
    assert [line["curriculum/from_unseen"] for line in run.lines()] == [1.0] * 3
    assert 'use = "pass_rate"' in Path(run.path / "config.toml").read_text()
