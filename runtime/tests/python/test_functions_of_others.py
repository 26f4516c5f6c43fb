"""Reward functions written for TRL and verl, through every door: as an object, in a file, by name in a module."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys

import numpy as np
import pytest
from rlhf.errors import ConfigError, PluginImportFailed, PluginInvalid, PluginVersionMismatch, RewardError
from rlhf.plugins import Plugins
from rlhf_runtime.config.components import component_config, select
from rlhf_runtime.config.sections import Choice, label_of
from rlhf_runtime.python.components import reward_entries
from rlhf_runtime.rewards.scoring import ActiveReward

from runtime.tests.python.test_reward_functions import group
from tests.support.scoring import score

TRL = '''
import re

def think_format_reward(completions: list[list[dict[str, str]]], **kwargs) -> list[float]:
    """As trl.rewards.think_format_reward."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>(.*?)</think>.*$", content, re.DOTALL) else 0.0 for content in contents]

def accuracy_reward(completions, solution: list[str], log_extra=None, log_metric=None, **kwargs):
    """As trl.rewards.accuracy_reward: messages, a column, and what it logs."""
    contents = [completion[0]["content"] for completion in completions]
    rewards = [float(c == s) for c, s in zip(contents, solution, strict=True)]
    if log_extra is not None:
        log_extra("parsed", contents)
        log_metric("accuracy", sum(rewards) / len(rewards))
    return rewards

class _SoftOverlongPunishment:
    __name__ = "soft_overlong_punishment_reward"

    def __init__(self, limit): self.limit = limit

    def __call__(self, completion_ids: list[list[int]], **kwargs) -> list[float]:
        return [float(min(0, self.limit - len(ids))) for ids in completion_ids]

overlong = _SoftOverlongPunishment(2)

async def lengths(prompts, completions, completion_ids, answer, **kwargs):
    return [len(p) + len(c) / 10 for p, c in zip(prompts, completions, strict=True)]
'''
VERL = """
def extract_solution(solution_str, method="strict"):
    return solution_str.strip()

def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    correct = extract_solution(solution_str) == ground_truth
    return {"score": scale * correct, "acc": correct, "source": data_source, "index": extra_info["index"]}
"""
VERL_COLUMNS = {
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 3},
}


@pytest.fixture(params=["object", "file", "module"])
def door(request, tmp_path, monkeypatch):
    """Gives what ``rlhf.train(reward=...)`` takes for a name in a text of Python."""

    def through(text: str, name: str):
        path = tmp_path / f"functions_{request.node.name.translate(str.maketrans('', '', '[]-'))}.py"
        path.write_text(text)
        if request.param == "file":
            return f"file:{path}:{name}"
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        module = importlib.import_module(path.stem)
        monkeypatch.delitem(sys.modules, path.stem)
        return getattr(module, name) if request.param == "object" else f"python:{path.stem}:{name}"

    return through


FROM_FILE = pytest.mark.parametrize("door", ["file"], indirect=True)


def scored(reward, group, **options):
    """The results of a run's scorer; a plain ``def`` runs in a worker process."""
    plugins = Plugins.discover()
    [entry] = reward_entries(plugins, reward)
    resolved = plugins.resolve("reward", entry["use"])
    config = component_config(resolved, options, "reward.0")
    instance = select(plugins, "reward", Choice(use=entry["use"], options=options)).build()
    score([ActiveReward("unit", resolved, instance, config, deadline=20.0)], group, workers=1)
    if errors := [t.error for t in group.trajectories if t.error]:
        raise RewardError(errors[0])
    return [t.rewards["unit"] for t in group.trajectories]


def messages(text="1+1="):
    return [{"role": "user", "content": text}]


def test_a_function_for_trl_gets_messages_columns_and_its_loggers(door):
    samples = group("2", "33", prompt=messages(), solution="2")
    results = scored(door(TRL, "accuracy_reward"), samples)
    assert [r.value for r in results] == [1.0, 0.0]
    assert [r.info for r in results] == [{"parsed": "2", "accuracy": 0.5}, {"parsed": "33", "accuracy": 0.5}]


@FROM_FILE
def test_options_name_columns_and_ask_for_messages_where_the_prompt_is_text(door):
    function = door(TRL, "accuracy_reward")
    options = {"messages": True, "columns": {"solution": "reward_model.ground_truth"}}
    assert [r.value for r in scored(function, group("2", **VERL_COLUMNS), **options)] == [1.0]
    with pytest.raises(
        RewardError, match=r"'accuracy_reward'.* 'solution', and the data has no such.*Set `columns\.sol"
    ):
        scored(function, group("2"))


def test_an_object_that_is_called_scores_tokens(door):
    assert [r.value for r in scored(door(TRL, "overlong"), group("2", "4444"))] == [0.0, -2.0]


@FROM_FILE
def test_an_async_function_is_awaited(door):
    assert [r.value for r in scored(door(TRL, "lengths"), group("2", "4444"))] == [4.1, 4.4]


@FROM_FILE
def test_a_function_for_verl_gets_a_sample_and_may_return_a_mapping(door):
    function, samples = door(VERL, "compute_score"), group("2", "33", **VERL_COLUMNS)
    results = scored(function, samples, arguments={"scale": 2.0})
    assert [r.value for r in results] == [2.0, 0.0]
    assert results[0].info == {"acc": True, "source": "gsm8k", "index": 3}
    options = {"columns": {"ground_truth": "answer"}, "arguments": {"data_source": "x", "extra_info": {"index": 1}}}
    assert [r.value for r in scored(function, group("2"), **options)] == [1.0]


def test_one_function_of_a_file_needs_no_name_and_helpers_do_not_count(tmp_path):
    path = tmp_path / "verl.py"
    path.write_text(VERL)
    assert [r.value for r in scored(f"file:{path}", group("2", **VERL_COLUMNS))] == [1.0]
    path = tmp_path / "trl.py"
    path.write_text("def reward_func(completions, **kwargs): return [0.5] * len(completions)\n")
    assert [r.value for r in scored(f"file:{path}", group("2"))] == [0.5], "not one of OpenRLHF's"
    path.write_text(TRL)
    with pytest.raises(PluginInvalid, match=r"defines 3 plugins of this kind; pick one: .*:accuracy_reward"):
        Plugins.discover().resolve("reward", f"file:{path}")


def instance(function, **options):
    plugins = Plugins()
    [entry] = reward_entries(plugins, function)
    return select(plugins, "reward", Choice(use=entry["use"], options=options)).build()


def test_the_columns_that_a_function_needs_are_declared_with_the_option_that_names_them():
    def f(completions, solution, level=None, log_extra=None, **columns):
        return []

    def verl(data_source, solution_str, ground_truth, extra_info):
        return 0.0

    assert instance(f).columns() == {"solution": "columns.solution"}
    assert instance(f, columns={"solution": "answer"}).columns() == {"answer": "columns.solution"}
    assert instance(f, columns={"level": "stage"}).columns() == {
        "solution": "columns.solution",
        "stage": "columns.level",
    }
    assert instance(f, arguments={"solution": ["2"]}).columns() == {}
    assert instance(verl, arguments={"data_source": "x"}).columns() == {
        "reward_model.ground_truth": "columns.ground_truth"
    }
    assert (instance(f).reads, instance(lambda completion_ids: []).reads) == ("text", "tokens")


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda completions: [], {"columns": {"solution": "a"}}, r"columns\.solution: .*has no parameter 'solution'"),
        (lambda completions: [], {"arguments": {"k": 1}}, r"arguments\.k: .*has no parameter 'k'; it has completions"),
        (lambda completions: [], {"arguments": {"completions": []}}, r"arguments\.completions: .*from the run"),
        (lambda completions, a: [], {"arguments": {"a": 1}, "columns": {"a": "b"}}, r"columns\.a and arguments\.a"),
        (lambda completions, trainer_state: [], {}, r"parameter 'trainer_state', which rlhf does not pass to rewards"),
    ],
)
def test_options_that_a_function_cannot_take_are_refused_before_the_start(function, options, message):
    with pytest.raises(ConfigError, match=message):
        instance(function, **options)


def logs(*calls):
    def f(completions, log_extra, log_metric):
        for name, *arguments in calls:
            {"extra": log_extra, "metric": log_metric}[name](*arguments)
        return [np.float32(0.5)] * len(completions)

    return f


def test_what_is_logged_is_checked():
    score = instance(logs(("metric", "a", np.array(1)), ("metric", "a", 3), ("extra", "b", np.array([4, 5])))).score
    assert [r.info for r in score(group("2", "3"))] == [{"a": 2.0, "b": 4}, {"a": 2.0, "b": 5}]
    for call, message in {
        ("extra", "b", (1,)): r"log_extra\('b', .*expected a list with 2 values",
        ("metric", "a", "x"): r"log_metric\('a'\) returned str 'x'; expected a finite number",
        ("metric", "a", None): "expected a number",
    }.items():
        with pytest.raises(RewardError, match=message):
            instance(logs(call)).score(group("2", "3"))
    with pytest.raises(RewardError, match="logs 'a' with log_extra and with log_metric"):
        instance(logs(("metric", "a", 1), ("extra", "a", [1, 2]))).score(group("2", "3"))


@pytest.mark.parametrize(
    ("value", "message"), [({"acc": 1}, "mapping with acc; 'score' is missing"), ("1", "returned str '1'; expected")]
)
def test_what_a_function_of_a_solution_returns_is_checked(value, message):
    with pytest.raises(RewardError, match=message):
        instance(lambda solution_str, ground_truth: value).score(group("2", ground_truth="1", **VERL_COLUMNS))


def test_tokens_that_are_not_known_are_left_out():
    samples = group("2")
    for turn in samples.trajectories[0].turns:
        turn.ids = []
    [result] = instance(lambda completions, **columns: [float("completion_ids" in columns)]).score(samples)
    assert result.value == 0.0
    with pytest.raises(RewardError, match="'completion_ids', and"):
        instance(lambda completion_ids: [1.0]).score(samples)


def test_a_name_in_a_module_is_recorded_and_checked_by_its_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "unit_rewards.py").write_text("def short(completions): return [1.0]\nlimit = 3\n")
    importlib.invalidate_caches()
    plugin = Plugins.discover().resolve("reward", "python:unit_rewards:short")
    assert (plugin.name, plugin.distribution, label_of(plugin.ref)) == ("short", "python", "short")
    assert pickle.loads(pickle.dumps(plugin)).cls is plugin.cls
    assert plugin.manifest()["ref"] == "python:unit_rewards:short"
    Plugins.discover().verify([plugin.manifest()])
    with pytest.raises(PluginVersionMismatch, match="the source of python:unit_rewards:short has changed"):
        Plugins.discover().verify([{**plugin.manifest(), "sha256": "0"}])
    resolve = functools.partial(Plugins.discover().resolve, "reward")
    with pytest.raises(PluginInvalid, match=r"unit_rewards has no 'shrot'. Did you mean 'short'"):
        resolve("python:unit_rewards:shrot")
    with pytest.raises(PluginInvalid, match=r"expected one subclass .*Reward, or one function .*, got 3"):
        resolve("python:unit_rewards:limit")
    with pytest.raises(PluginImportFailed, match="No module named 'unit_nothing'"):
        resolve("python:unit_nothing:f")
