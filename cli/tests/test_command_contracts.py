"""The suite of commands, for the commands of this distribution that need no files."""

from rlhf_cli.completion import Completion
from rlhf_cli.data import Data
from rlhf_cli.doctor.command import Doctor
from rlhf_cli.jobs.convert import Convert
from rlhf_cli.jobs.eval import Eval
from rlhf_cli.jobs.export import Export
from rlhf_cli.jobs.generate import Generate
from rlhf_cli.jobs.score import Score
from rlhf_cli.plan.command import PlanCommand
from rlhf_cli.plugins import PluginsCommand
from rlhf_cli.rewards.command import Rewards
from rlhf_cli.train import Train
from rlhf_testing.command import CommandContract


class TestCompletion(CommandContract):
    command = Completion


class TestConvert(CommandContract):
    command = Convert


class TestData(CommandContract):
    command = Data


class TestDoctor(CommandContract):
    command = Doctor


class TestEval(CommandContract):
    command = Eval


class TestExport(CommandContract):
    command = Export


class TestGenerate(CommandContract):
    command = Generate


class TestPlanCommand(CommandContract):
    command = PlanCommand


class TestPluginsCommand(CommandContract):
    command = PluginsCommand


class TestRewards(CommandContract):
    command = Rewards


class TestScore(CommandContract):
    command = Score


class TestTrain(CommandContract):
    command = Train
