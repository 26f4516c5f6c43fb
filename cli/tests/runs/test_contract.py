"""The commands pass the suite of their kind."""

import json

import pytest
from rlhf_cli.runs.list_runs import RunsCommand
from rlhf_cli.runs.show_run import ShowCommand
from rlhf_cli.runs.show_samples import SamplesCommand
from rlhf_testing.command import CommandContract


@pytest.fixture(scope="module", autouse=True)
def run(tmp_path_factory):
    """A run directory written by the test: one step, no samples."""
    folder = tmp_path_factory.mktemp("runs") / "1"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    file = folder / "samples.jsonl"
    file.write_text("")
    for suite, words in ((TestRuns, [folder.parent]), (TestShow, [folder]), (TestSamples, [file])):
        suite.calls = [(list(map(str, words)), 0)]


class TestRuns(CommandContract):
    command = RunsCommand


class TestShow(CommandContract):
    command = ShowCommand


class TestSamples(CommandContract):
    command = SamplesCommand
