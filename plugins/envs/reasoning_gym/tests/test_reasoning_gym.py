"""Every task of the real package: drawn by seed, scored, and what is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from rlhf.errors import EnvError
from rlhf.types import EnvStep, Row
from rlhf_plugin_reasoning_gym import ReasoningGym
from rlhf_plugin_reasoning_gym.task import GymEntry

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
MIX = {"datasets": [{"name": "chain_sum", "weight": 3}, {"name": "gcd", "config": {"max_numbers": 2}}]}
ANY_TEXT = {"boxnet", "prime_factorization", "game_of_life_halting"}
"""The scorers of the first two raise for an answer of another form; the third reads any text but True as False."""


def row(**columns) -> Row:
    return Row({"prompt": "", **columns}, "unit", 4)


def answer(text: str, seed: int = 0, columns=None, **config) -> EnvStep:
    game = ReasoningGym(ReasoningGym.Config(**config))
    game.reset(row(**columns or {}), seed)
    return game.step(text)


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.full)], ids=["some", "all"])
def test_a_task_is_drawn_and_its_own_answer_scores_1_and_another_less(step: int) -> None:
    from reasoning_gym.factory import DATASETS  # takes seconds, for which a collection of tests need not wait

    tasks = sorted(set(DATASETS) - {"composite"})
    assert len(tasks) == 105
    for task in tasks[::step]:
        entry = GymEntry(task, {}, 2**31 - 1)
        assert entry.question
        assert (entry.answer is None) == (task in NO_ANSWER), task
        if entry.answer is not None:
            assert entry.score(entry.answer) == 1.0, task
        if task not in ANY_TEXT:
            assert entry.score("no answer at all") < 1.0, task


def test_the_seed_chooses_the_question_and_a_row_may_choose_its_own() -> None:
    def opening(sample: int, **columns) -> str:
        return ReasoningGym(ReasoningGym.Config(task="chain_sum")).reset(row(**columns), sample)

    assert opening(2**62 + 1) == opening(2**62 + 1) != opening(2**62 + 2)
    assert opening(1, seed=9) == opening(2, seed=9) == GymEntry("chain_sum", {}, 9).question


def test_a_tag_or_the_whole_turn_is_the_answer() -> None:
    right = GymEntry("chain_sum", {}, 0).answer
    text = f"It is <answer>0</answer>, no, <answer> {right} </answer>."
    assert answer(text, task="chain_sum") == EnvStep(
        reward=1.0, done=True, info={"task": "chain_sum", "answered": True}
    )
    assert answer(f" {right}\n", task="chain_sum", answer="text").reward == 1.0
    result = answer(str(right), task="chain_sum")
    assert (result.reward, result.done, result.info["answered"]) == (0.0, True, False)


def test_a_mixture_draws_from_its_parts_by_weight() -> None:
    tasks = [GymEntry("composite", MIX, seed).task for seed in range(40)]
    assert tasks.count("chain_sum") > tasks.count("gcd") > 0
    right = GymEntry("composite", MIX, 3).answer
    assert answer(right, seed=3, task="composite", task_config=MIX, answer="text").reward == 1.0


def test_rows_may_name_the_task_and_its_config() -> None:
    columns = {"task": "gcd", "task_config": {"max_numbers": 2}, "seed": 1}
    right = GymEntry("gcd", {"max_numbers": 2}, 1).answer
    for config in ({}, {"task": "chain_sum", "task_config": {"max_terms": 3}}):
        assert answer(right, columns=columns, answer="text", **config).reward == 1.0


def test_an_error_of_the_scorer_is_a_failed_sample_unless_it_has_a_score() -> None:
    with pytest.raises(EnvError, match=r"scorer of task 'prime_factorization' raised ValueError: .* Set scorer_error"):
        answer("primes", task="prime_factorization", answer="text")
    step = answer("primes", task="prime_factorization", answer="text", scorer_error=0.0)
    assert (step.reward, step.done) == (0.0, True)
    assert "ValueError" in step.info["scorer_error"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no column 'task', and \\[env\\] sets no task"),
        ({"task": "chain_sun"}, "row 4 of source 'unit': reasoning-gym has no task 'chain_sun'. Did you mean"),
        ({"task": "gcd", "task_config": "x"}, "has str 'x'; allowed in the column 'task_config': a table"),
        ({"task_config": {}}, "no column 'task'"),
        ({"task": "gcd", "seed": -1}, "has the seed int -1; allowed: a whole number from 0 to 2147483647"),
        ({"task": "gcd", "seed": "7"}, "has the seed str '7'"),
        ({"task": "gcd", "seed": True}, "has the seed bool True"),
    ],
)
def test_a_wrong_row_is_refused(columns, message) -> None:
    with pytest.raises(EnvError, match=message):
        answer("1", columns=columns)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "chain_sun"}, "no task 'chain_sun'. Did you mean 'chain_sum'"),
        ({"task": "zzz"}, "no task 'zzz'. It has 106"),
        ({"task": "chain_sum", "task_config": {"max_term": 3}}, "no option 'max_term'. Did you mean 'max_terms'"),
        ({"task": "chain_sum", "task_config": {"seed": 3}}, "'seed' is set for every entry; remove it"),
        ({"task": "chain_sum", "task_config": {"min_terms": 9, "max_terms": 3}}, "makes no entry with"),
        ({"task": "chain_sum", "task_config": {"min_terms": "9"}}, "makes no entry with"),
        ({"task": "spell_backward", "task_config": {"max_word_len": 3, "min_word_len": 99}}, "makes no entry with"),
        ({"task_config": {"min_terms": 3}}, "task_config is set without a task"),
        ({"task": "composite"}, "'composite' needs 'datasets'"),
        ({"task": "composite", "task_config": {"datasets": ["gcd"]}}, "'datasets' holds str 'gcd'; allowed: tables"),
        ({"task": "composite", "task_config": {"datasets": [{"name": "gdc"}]}}, "no task 'gdc'. Did you mean 'gcd'"),
    ],
)
def test_a_wrong_config_is_refused_before_the_run(config, message) -> None:
    with pytest.raises(ValidationError, match=message):
        ReasoningGym.Config(**config)
