"""The suite of commands, for the commands of this distribution."""

from rlhf_plugin_jobs.convert import Convert
from rlhf_plugin_jobs.eval import Eval
from rlhf_plugin_jobs.export import Export
from rlhf_plugin_jobs.generate import Generate
from rlhf_plugin_jobs.score import Score
from rlhf_testing.command import CommandContract


class TestConvert(CommandContract):
    command = Convert


class TestEval(CommandContract):
    command = Eval


class TestExport(CommandContract):
    command = Export


class TestGenerate(CommandContract):
    command = Generate


class TestScore(CommandContract):
    command = Score
