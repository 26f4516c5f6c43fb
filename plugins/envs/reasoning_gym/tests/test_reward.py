"""Rows that hold questions: written by the command, scored by the reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rlhf.errors import RewardError
from rlhf.types import Group, Row, Trajectory, Turn
from rlhf_plugin_reasoning_gym import ReasoningGymReward
from rlhf_plugin_reasoning_gym.__main__ import rows
from rlhf_plugin_reasoning_gym.task import GymEntry


def score(columns, *answers: str, **config) -> list[float | None]:
    row = Row(columns, "unit", 4)
    turns = [[Turn([1], False), Turn([2], True, text=answer)] for answer in answers]
    group = Group(row, 0, [Trajectory(row, t, (0, n)) for n, t in enumerate(turns)])
    return [r.value for r in ReasoningGymReward(ReasoningGymReward.Config(**config)).score(group)]


def command(*words: str, **environment: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    program = [sys.executable, "-m", "rlhf_plugin_reasoning_gym", *words]
    return subprocess.Popen(program, env=clean | environment, stdout=subprocess.PIPE, text=True)


def test_the_command_writes_the_questions_of_worker_processes() -> None:
    """Worker processes have one hash seed (``rlhf_runtime.calls.plugin_worker``): the order of sets depends on it."""
    words = ("ransom_note", "--rows", "3", "--first-seed", "5", "--config", '{"max_note_length": 12}')
    programs = [command(*words), command(*words, PYTHONHASHSEED="0")]
    questions, repeat = ([json.loads(line) for line in program.communicate()[0].splitlines()] for program in programs)
    assert [row["seed"] for row in questions] == [5, 6, 7]
    assert questions == repeat


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chain_sun"], "no task 'chain_sun'. Did you mean 'chain_sum'"),
        (["chain_sum", "--config", "[]"], "a JSON object is expected"),
        (["chain_sum", "--rows", "0"], "at least 1 row"),
    ],
)
def test_wrong_words_of_the_command_are_refused(words, message, monkeypatch, capsys) -> None:
    from rlhf_plugin_reasoning_gym.__main__ import main

    monkeypatch.setattr(sys, "argv", ["rows", *words])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def test_answers_are_scored_by_the_task_of_the_row() -> None:
    [columns] = rows("gcd", {"max_numbers": 2}, range(7, 8))
    right = GymEntry("gcd", {"max_numbers": 2}, 7).answer
    assert score(columns, f"<answer>{right}</answer>", "<answer>x</answer>", str(right)) == [1.0, 0.0, 0.0]
    assert score(columns, str(right), answer="text") == [1.0]
    assert score({**columns, "prompt": f"Think.\n{columns['prompt']}"}, str(right), answer="text") == [1.0]


def test_an_error_of_the_scorer_fails_its_sample_only() -> None:
    [columns] = rows("prime_factorization", {}, range(1))
    with pytest.raises(RewardError, match="prime_factorization' raised ValueError"):
        score(columns, "primes", answer="text")
    assert score(columns, "primes", answer="text", scorer_error=0.0) == [0.0]
    assert ReasoningGymReward.per_sample


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "What is 2 + 2?"}, "asks str .*, which is not in the row's prompt.* Write the rows again"),
        ({"seed": None}, "row 4 of source 'unit' has task = str 'gcd', .* seed = NoneType None; allowed"),
        ({"task_config": "{}"}, "task_config = str '{}'"),
    ],
)
def test_a_wrong_row_is_an_error(change, message) -> None:
    [columns] = rows("gcd", {}, range(1))
    with pytest.raises(RewardError, match=message):
        score({**columns, **change}, "1")
