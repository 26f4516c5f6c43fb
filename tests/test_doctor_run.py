"""`rlhf doctor RUN`: causes of a gap between generator and trainer are planted in runs and recordings, and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rlhf.types import Row, Turn
from rlhf_runtime.checkpoint.saved_groups import read_groups, write_groups
from rlhf_runtime.jobs.mismatch import ARITHMETIC, CAUSES, CUT, ENDS, STALE, TEMPERATURE, TEMPLATE
from rlhf_testing.tiny import CHAT_TEMPLATE, tiny_model

from tests.runs import Workshop, merged

STEPS = 2
LAST = f"rollouts/step-{STEPS:06d}.arrow"
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "checkpoint": {"every": 1},
    "trainer": {"lr": 0.02},
    "sampling": {"stop": list("abcdefghijklm"), "max_new_tokens": 8},
}
OF_RUNS: dict[str, dict[str, Any]] = {
    STALE: {"stream": {"staleness": 1}},
    ARITHMETIC: {"generator": {"dtype": "bf16"}},
    CUT: {"sampling": {"top_p": 0.7}, "algorithm": {"loss": {"correction": {"preset": "tis"}}}},
}
"""Causes that options of a run make."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: Workshop) -> Callable[..., Path]:
    """Makes runs with the causes that options make; each once."""
    shop = Workshop(tmp_path_factory.mktemp("runs"), tiny.model, tiny.data)

    @cache
    def make(*causes: str) -> Path:
        changes = SHORT
        for cause in causes:
            changes = merged(changes, OF_RUNS[cause])
        return shop.train("grpo", "-".join(["run", *causes]), **changes).path

    return make


def planted(trained: Callable[..., Path], folder: Path, *causes: str) -> Path:
    """A copy of a run, whose last step has the causes."""
    shutil.copytree(trained(*(cause for cause in causes if cause in OF_RUNS)), folder)
    edit(folder / LAST, causes)
    return folder


def edit(file: Path, causes: tuple[str, ...]) -> None:
    """Plant the causes that a recording alone can have: tokens, log-probs or a temperature that were not the
    generator's."""

    def edited(turn: Turn) -> Turn:
        if not turn.sampled:
            return replace(turn, ids=[*turn.ids[:1], *turn.ids]) if TEMPLATE in causes else turn
        logprobs = list(turn.logprobs or ())
        if ENDS in causes and turn.finish == "stop":
            logprobs[-1] = 0.0
        return replace(turn, logprobs=logprobs, temperature=0.5 if TEMPERATURE in causes else turn.temperature)

    groups = read_groups(file, lambda source, index: Row({}, source, index))
    prompts = {t.index: t.prompt_text for group in groups for t in group.trajectories}
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.turns = [edited(turn) for turn in trajectory.turns]
    write_groups(file, groups, lambda trajectory: prompts[trajectory.index])


def result(shop: Workshop, run: Path, *flags: str) -> dict[str, Any]:
    answer = shop.command("doctor", str(run), "--json", *flags)
    assert answer.code == 0, answer.said
    return json.loads(answer.out)


@pytest.mark.parametrize("causes", [*((cause,) for cause in CAUSES), *combinations(CAUSES, 2)], ids=" + ".join)
def test_planted_causes_are_named(shop: Workshop, trained: Callable[..., Path], causes: tuple[str, ...]) -> None:
    answer = result(shop, planted(trained, shop.folder / "run", *causes))
    assert set(answer["causes"]) == set(causes), answer
    assert all(cause in answer["verdict"] for cause in causes)
    assert answer["left"] < answer["gap"] / 2 or causes == (ARITHMETIC,)
    assert answer["left"] <= 2 * answer["rounding"] if ARITHMETIC in causes else answer["left"] < 1e-5


def test_a_run_without_a_gap(shop: Workshop, trained: Callable[..., Path]) -> None:
    run = trained()
    answer = result(shop, run)
    assert (answer["step"], answer["causes"], answer["dtype"]) == (STEPS, [], "fp32")
    assert answer["gap"] < 1e-5
    assert "agree" in answer["verdict"]
    first = result(shop, run, "--step", "1", "--samples", "2")
    assert (first["step"], first["samples"], first["causes"]) == (1, 2, [])
    text = shop.command("doctor", str(run))
    assert text.code == 0
    assert all(words in text.out for words in ("0 to 15", "not examined", "agree"))


def test_adapters_a_chat_template_and_log_probs_that_the_run_recorded(shop: Workshop) -> None:
    model = tiny_model(shop.folder / "chat", hidden=16, heads=2, kv_heads=1, chat_template="default")
    changes = {"policy": {"model": str(model)}, "algorithm": {"epochs": 2}}
    changes["trainer"] = {"lora": {"rank": 2}, "lr": 0.02}
    run = shop.train("grpo", "run", **merged(SHORT, changes)).path
    answer = result(shop, run)
    assert answer["gap"] < 1e-5
    assert answer["reproduced"] < 1e-5
    other = shop.file("other.jinja", CHAT_TEMPLATE.replace("<eos>", "<eos>\n"))
    answer = result(shop, run, "--data.chat_template", str(other))
    notes = {experiment["cause"]: experiment for experiment in answer["experiments"]}
    assert "12 of 12 prompts differ" in notes[TEMPLATE]["note"]
    assert notes[TEMPLATE]["gap"] > answer["gap"]
    assert answer["causes"] == []


def test_old_weights_that_are_not_kept_are_not_examined(shop: Workshop) -> None:
    """The checkpoints of steps 4 and 5 are kept; the samples of step 5 are of version 2."""
    changes = {"stream": {"staleness": 2}, "run": {"steps": 5}, "checkpoint": {"keep": 2}}
    run = shop.train("grpo", "run", **merged(SHORT, changes)).path
    answer = result(shop, run)
    stale = next(e for e in answer["experiments"] if e["cause"] == STALE)
    assert (stale["gap"], answer["causes"]) == (None, [])
    assert "not kept" in stale["note"]
    assert "stale" not in answer["verdict"]
    assert "--checkpoint.keep" in answer["verdict"]
    early = shop.command("doctor", str(run), "--step", "3")
    assert early.code == 2
    assert all(words in early.said for words in ("not kept", "--step 1, 5", "--checkpoint.every 1"))


def test_what_cannot_be_examined_is_refused(shop: Workshop, trained: Callable[..., Path]) -> None:
    def refused(*words: object, code: int = 2) -> str:
        answer = shop.command("doctor", *map(str, words))
        assert answer.code == code, answer.said
        return answer.said

    (shop.folder / "empty").mkdir()
    assert "holds no run" in refused(shop.folder / "empty")
    offline = shop.train("sft", "offline", run={"steps": 1}).path
    assert "samples nothing" in refused(offline)
    run = planted(trained, shop.folder / "run")
    assert "--step 7" in refused(run, "--step", 7)
    assert "--samples 0" in refused(run, "--samples", 0)
    assert "--start" in refused(run, "--start")
    assert "folder of a run" in refused("--step", 1)
    groups = read_groups(run / LAST, lambda source, index: Row({}, source, index))
    for turn in (turn for group in groups for t in group.trajectories for turn in t.turns):
        turn.logprobs = None
    write_groups(run / LAST, groups)
    assert "log-probs of the generator" in refused(run)
    (run / LAST).write_bytes((run / LAST).read_bytes()[:200])
    assert LAST in refused(run, code=1)
    (run / "config.toml").unlink()
    assert "config.toml" in refused(run)
