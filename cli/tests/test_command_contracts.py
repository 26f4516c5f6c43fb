"""The suite of commands, for the commands of this distribution that need no files."""

from rlhf_cli.completion import CompletionCommand
from rlhf_cli.data import DataCommand
from rlhf_cli.doctor.command import Doctor
from rlhf_cli.jobs.convert import ConvertCommand
from rlhf_cli.jobs.eval import EvalCommand
from rlhf_cli.jobs.export import ExportCommand
from rlhf_cli.jobs.generate import GenerateCommand
from rlhf_cli.jobs.score import ScoreCommand
from rlhf_cli.plan.command import PlanCommand
from rlhf_cli.plugins import PluginsCommand
from rlhf_cli.rewards.command import RewardsCommand
from rlhf_cli.train import TrainCommand
from rlhf_testing.command import CommandContract


class TestCompletion(CommandContract):
    command = CompletionCommand


class TestConvert(CommandContract):
    command = ConvertCommand


class TestData(CommandContract):
    command = DataCommand


class TestDoctor(CommandContract):
    command = Doctor


class TestEval(CommandContract):
    command = EvalCommand


class TestExport(CommandContract):
    command = ExportCommand


class TestGenerate(CommandContract):
    command = GenerateCommand


class TestPlanCommand(CommandContract):
    command = PlanCommand


class TestPluginsCommand(CommandContract):
    command = PluginsCommand


class TestRewards(CommandContract):
    command = RewardsCommand


class TestScore(CommandContract):
    command = ScoreCommand


class TestTrain(CommandContract):
    command = TrainCommand
