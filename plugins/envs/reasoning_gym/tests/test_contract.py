"""The conformance suite of environments."""

from rlhf_plugin_reasoning_gym import ReasoningGym
from rlhf_testing.env import EnvContract


class TestReasoningGym(EnvContract):
    env = ReasoningGym
    configs = (
        ReasoningGym.Config(task="chain_sum"),
        ReasoningGym.Config(task="spell_backward", task_config={"max_word_len": 4}, answer="text", scorer_error=0.0),
    )
    rows = ({"prompt": ""}, {"prompt": "", "seed": 3}, {"prompt": "", "task": "rush_hour"})
    actions = ("<answer>4</answer>", "4", "", "\N{SNOWMAN}", "<answer></answer> <answer>a\nb</answer>")
