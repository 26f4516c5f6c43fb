"""What ``rlhf.train(reward=...)`` takes, and what it makes of it."""

from __future__ import annotations

import asyncio
import functools
import os

import numpy as np
import pytest
from rlhf.errors import ConfigError, PluginConflict, RewardError
from rlhf.interfaces import ComponentConfig, Reward
from rlhf.plugins import Plugins
from rlhf.types import Group, RewardResult, Row, Trajectory, Turn
from rlhf_runtime.config.components import component_config
from rlhf_runtime.data.sources import SourceLayout
from rlhf_runtime.python.components import reward_class, reward_entries
from rlhf_runtime.rewards.scoring import ActiveReward

from tests.support.scoring import score


def group(*answers: str, prompt="1+1=", **columns) -> Group:
    layout = SourceLayout({"prompt": "prompt"})
    row = Row({"prompt": prompt, "answer": "2", **columns}, "unit", 7, layout)
    turns = [[Turn([1, 2], sampled=False, text="1+1="), Turn([3] * len(a), sampled=True, text=a)] for a in answers]
    return Group(row, 0, [Trajectory(row, sample, (0, n)) for n, sample in enumerate(turns)])


def build(reward):
    """The selected plugin, an instance of it and its config, as a run makes them."""
    plugins = Plugins()
    [entry] = reward_entries(plugins, reward)
    resolved = plugins.resolve("reward", entry["use"])
    options = {key: value for key, value in entry.items() if key not in ("use", "name")}
    config = component_config(resolved, options, "reward.0")
    return resolved, resolved.cls(config), config


def values(reward, group: Group) -> list[float | None]:
    """What the reward gives, called here."""
    answer = build(reward)[1].score(group)
    results = asyncio.run(answer) if asyncio.iscoroutine(answer) else answer
    return [result.value for result in results]


def scored(reward, group: Group) -> list[float | None]:
    """What a run would compute: by worker processes where the reward is plain ``def``."""
    resolved, instance, config = build(reward)
    score([ActiveReward("unit", resolved, instance, config, deadline=20.0)], group, workers=1)
    if errors := [t.error for t in group.trajectories if t.error]:
        raise RewardError(errors[0])
    return [t.rewards["unit"].value for t in group.trajectories]


def by_sample(prompt, completion, row):
    return len(completion) + 10 * (row["answer"] in completion) + (prompt == "1+1=")


def test_a_function_of_a_sample_is_called_for_each():
    assert values(by_sample, group("2", "33")) == [12.0, 3.0]


def test_a_missing_column_is_named_with_the_columns_that_there_are():
    """In a worker process too, to which the row is sent."""
    for call in (values, scored):
        with pytest.raises((KeyError, RewardError), match=r"no column 'anwser'; columns present: .*answer"):
            call(lambda prompt, completion, row: row["anwser"], group("2"))


def test_a_function_of_completions_gets_lists_of_the_columns():
    def f(completions, prompts, answer, completion_ids, **columns):
        assert [*columns] == ["prompt", "level", "log_extra", "log_metric"]
        assert (columns["prompt"], columns["level"]) == (["1+1=", "1+1="], [3, 3])
        assert prompts == ["1+1=", "1+1="]
        return [float(a == c) + len(ids) for c, a, ids in zip(completions, answer, completion_ids, strict=True)]

    assert values(f, group("2", "33", level=3)) == [2.0, 2.0]


def test_a_function_without_keywords_gets_only_what_it_has_parameters_for():
    def f(completions, level=None, extra=5):
        return [level[0] + extra] * len(completions)

    assert values(f, group("2", "3", level=1)) == [6.0, 6.0]


def test_a_conversation_as_prompt_makes_each_completion_a_message():
    messages = [{"role": "user", "content": "1+1="}]

    def f(prompts, completions, **columns):
        assert prompts == [messages]
        return [float(completions == [[{"role": "assistant", "content": "2"}]])]

    assert values(f, group("2", prompt=messages)) == [1.0]


def test_a_function_may_return_none_for_a_sample():
    assert values(lambda completions: [None, 1], group("2", "3")) == [None, 1.0]
    assert values(lambda prompt, completion, row: None, group("2")) == [None]


def test_an_array_of_values_is_a_list():
    def f(completions):
        import numpy as np

        return np.array([0.5] * len(completions))

    assert values(f, group("2", "3")) == [0.5, 0.5]


class Scale:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions):
        return [self.factor * len(c) for c in completions]


def scaled(factor, prompt, completion, row):
    return factor * len(completion)


@pytest.mark.parametrize("reward", [Scale(2.0).__call__, functools.partial(scaled, 2.0)], ids=["method", "partial"])
def test_functions_that_no_module_holds_run_in_worker_processes(reward):
    assert scored(reward, group("2", "33")) == [2.0, 4.0]


def test_a_plain_function_runs_in_a_worker_and_an_async_one_in_this_process():
    calls = []

    def plain(completions):
        calls.append(1)
        return [float(os.getpid())]

    async def asynchronous(completions):
        calls.append(2)
        return [float(os.getpid())]

    assert scored(plain, group("2")) != [float(os.getpid())]
    assert scored(asynchronous, group("2")) == [float(os.getpid())]
    assert calls == [2]


def test_a_function_that_uses_what_cannot_be_copied_is_refused_with_what_to_do():
    import threading

    lock = threading.Lock()

    def f(completions):
        with lock:
            return [1.0]

    with pytest.raises(RewardError, match=r"it uses cannot be copied: TypeError: .*lock.* function as `async"):
        scored(f, group("2"))


def test_a_function_that_uses_much_data_is_refused_with_what_to_do():
    table = np.zeros(9 << 20)
    message = r"it uses 72 MiB of data of this process; at most 64 MiB are copied\. Load the data inside"
    with pytest.raises(RewardError, match=message):
        scored(lambda completions: [float(table[0])], group("2"))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda completions: [1.0], r"returned list \[1\.0\]; expected a list with 2 numbers"),
        (lambda completions: 1.0, r"returned float 1\.0; expected a list with 2 numbers"),
        (lambda completions: [1.0, "2"], r"returned str '2' for sample \(0, 1\); expected a finite number or None"),
        (lambda completions: [float("nan")] * 2, r"returned float nan for sample \(0, 0\)"),
        (
            lambda completions, level: [1.0] * 2,
            r"has the parameter 'level', and the data has no such column",
        ),
    ],
)
def test_what_a_function_returns_is_checked(function, problem):
    with pytest.raises(RewardError, match=problem):
        values(function, group("2", "3"))


def test_a_column_named_like_an_argument_is_refused():
    with pytest.raises(RewardError, match=r"the data has a column 'completions', .* Rename the column"):
        values(lambda completions: [1.0], group("2", completions="x"))


SIGNATURES = r".*`def f\(prompt, completion, row\)`.*`def f\(completions, \*\*columns\)`"


@pytest.mark.parametrize(
    "function",
    [
        lambda sample: 1.0,
        lambda completion, prompt, row: 1.0,
        lambda prompt, completion: 1.0,
        lambda prompts, completion, **columns: 1.0,
        lambda *completions: [1.0],
        lambda completions, /: [1.0],
        lambda completion, completions: [1.0],
        lambda **columns: [1.0],
    ],
)
def test_other_parameters_are_refused_with_both_forms(function):
    with pytest.raises(ConfigError, match=r"reward function '<lambda>' has the parameters \(" + SIGNATURES):
        reward_class(function)


@pytest.mark.parametrize("value", [3, object, {"a": 1.0}])
def test_an_object_that_is_not_a_reward_is_refused_with_both_forms(value):
    with pytest.raises(ConfigError, match=r"reward: got .*; give a function, a Reward class" + SIGNATURES):
        reward_entries(Plugins(), value)


class Brevity(Reward):
    """Minus the length, times a factor."""

    class Config(ComponentConfig):
        factor: float = 1.0

    def score(self, group):
        return [RewardResult(-self.config.factor * len(t.answer)) for t in group.trajectories]


class Counting(Reward):
    name = "counting"

    def __init__(self, config=None):
        super().__init__(config)
        self.calls = 0

    async def score(self, group):
        self.calls += 1
        return [RewardResult(float(self.calls)) for t in group.trajectories]


def test_a_class_is_a_reward_named_after_itself():
    [entry] = reward_entries(Plugins(), Brevity)
    assert entry == {"use": "in process/brevity"}
    assert Brevity.name == ""  # the class itself is left alone
    assert values(Brevity, group("333")) == [-3.0]


def test_an_instance_is_recorded_with_its_options():
    instance = Brevity(Brevity.Config(factor=2.0))
    assert reward_entries(Plugins(), instance) == [{"use": "in process/brevity", "factor": 2.0}]
    assert scored(instance, group("333")) == [-6.0]


def test_an_async_instance_is_called_itself():
    counting = Counting()
    assert values(counting, group("2")) == [1.0]
    assert values(counting, group("2")) == [2.0]
    assert counting.calls == 2


def test_several_rewards_are_named():
    plugins = Plugins()
    entries = reward_entries(plugins, {"short": lambda completions: [0.0], "Right!": by_sample, "math": "math"})
    assert entries == [
        {"use": "in process/short", "name": "short"},
        {"use": "in process/right", "name": "Right!"},
        {"use": "math", "name": "math"},
    ]
    assert plugins.resolve("reward", "in process/right").cls.name == "right"
    assert [e["use"] for e in reward_entries(Plugins(), [by_sample, "length"])] == ["in process/by_sample", "length"]


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises((ConfigError, PluginConflict), match=r"by_sample"):
        reward_entries(Plugins(), [by_sample, by_sample])
    with pytest.raises(ConfigError, match=r"reward: a name must be a string, got int 1"):
        reward_entries(Plugins(), {1: by_sample})


def test_the_manifest_names_a_function_by_the_hash_of_its_source():
    def manifest(function):
        plugins = Plugins()
        [entry] = reward_entries(plugins, function)
        return plugins.resolve("reward", entry["use"]).manifest()

    first = manifest(by_sample)
    assert first == {
        "kind": "reward", "name": "by_sample", "distribution": "in process", "version": "", "sha256": first["sha256"],
    }  # fmt: skip
    assert len(first["sha256"]) == 64
    assert manifest(by_sample) == first
    assert manifest({"by_sample": scaled_by_hand})["sha256"] != first["sha256"]


def scaled_by_hand(prompt, completion, row):
    return 2.0 * len(completion)


def test_a_function_without_source_is_named_by_its_code():
    spaces: list[dict] = [{}, {}]
    for number, space in enumerate(spaces):
        exec(f"def f(completions): return [{number}.0]", space)
    hashes = [Plugins().register("reward", reward_class(space["f"])) for space in spaces]
    from rlhf.plugins.resolved import source_sha256

    first, second = map(source_sha256, hashes)
    assert len(first) == 64
    assert first != second
