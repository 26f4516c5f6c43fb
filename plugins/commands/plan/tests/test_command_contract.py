"""The suite of commands, for the commands of this distribution."""

from rlhf_plugin_plan.command import PlanCommand
from rlhf_testing.command import CommandContract


class TestPlanCommand(CommandContract):
    command = PlanCommand
