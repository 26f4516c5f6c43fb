"""The conformance suites of environments and rewards."""

from functools import cache
from typing import Any

from rlhf_plugin_reasoning_gym import ReasoningGym, ReasoningGymReward
from rlhf_plugin_reasoning_gym.__main__ import rows
from rlhf_testing.env import EnvContract
from rlhf_testing.reward import RewardContract


@cache
def row() -> dict[str, Any]:
    """Not read when tests are collected: the import of all tasks takes seconds."""
    [first] = rows("spell_backward", {}, range(1))
    return first


class TestReasoningGym(EnvContract):
    env = ReasoningGym
    rows = ({"prompt": ""}, {"prompt": "", "seed": 3}, {"prompt": "", "task": "rush_hour"})
    actions = ("<answer>4</answer>", "4", "", "\N{SNOWMAN}", "<answer></answer> <answer>a\nb</answer>")

    @property
    def configs(self) -> tuple[ReasoningGym.Config, ...]:
        """A config that names a task is checked against all tasks."""
        options = {"task": "spell_backward", "task_config": {"max_word_len": 4}, "answer": "text", "scorer_error": 0.0}
        return ReasoningGym.Config(task="chain_sum"), ReasoningGym.Config(**options)


class TestReasoningGymReward(RewardContract):
    reward = ReasoningGymReward
    configs = (ReasoningGymReward.Config(), ReasoningGymReward.Config(answer="text", scorer_error=0.0))

    @property
    def columns(self) -> dict[str, Any]:
        return row()

    @property
    def cases(self) -> list[tuple[dict[str, Any], str, float]]:
        return [(row(), f"<answer>{row()['prompt'].rpartition(': ')[2][::-1]}</answer>", 1.0)]

    def test_cases(self) -> None:
        self.configs = self.configs[:1]
        super().test_cases()
