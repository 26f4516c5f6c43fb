"""The conformance suite of rollouts. The scripted context calls the first tool in every answer but the last."""

from pathlib import Path

from rlhf_plugin_tools.options import ToolsConfig
from rlhf_plugin_tools.rollout import ToolsRollout
from rlhf_testing.rollout import RolloutContract

FILE = Path(__file__).parent / "functions_under_test.py"


class TestTools(RolloutContract):
    rollout = ToolsRollout
    configs = (ToolsConfig(functions=(f"file:{FILE}:now",)), ToolsConfig(functions=(f"file:{FILE}:now",), max_turns=1))
