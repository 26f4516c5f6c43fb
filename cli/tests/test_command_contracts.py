"""The suite of commands, for the commands of this distribution."""

from rlhf_cli.completion import Completion
from rlhf_cli.data import Data
from rlhf_cli.plugins import PluginsCommand
from rlhf_cli.train import Train
from rlhf_testing.command import CommandContract


class TestCompletion(CommandContract):
    command = Completion


class TestData(CommandContract):
    command = Data


class TestPluginsCommand(CommandContract):
    command = PluginsCommand


class TestTrain(CommandContract):
    command = Train
