"""The suite of commands, for every command of this distribution."""

import json

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.main import load_command
from rlhf_testing.command import CommandContract

PLUGINS = Plugins.discover()
NAMES = [entry.name for entry in PLUGINS.list("command") if entry.distribution == "rlhf-cli"]
PPO = (
    "python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path M --reward.model_name_or_path R "
    "--vllm.num_engines 1"
)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """{command: calls that need no model}; the run of some has one step, and no samples."""
    run = tmp_path_factory.mktemp("runs") / "1"
    run.mkdir()
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 0.5}) + "\n")
    (run / "samples.jsonl").touch()
    words = {
        "explain": [[], ["run.seed"]],
        "init": [["--algo", "sft"]],
        "migrate": [["openrlhf", PPO]],
        "runs": [[str(run.parent)]],
        "samples": [[str(run / "samples.jsonl")]],
        "show": [[str(run)]],
    }
    return {name: [(arguments, 0) for arguments in lists] for name, lists in words.items()}


class TestCommands(CommandContract):
    @pytest.fixture(autouse=True, params=NAMES)
    def command_of_a_name(self, request, calls):
        request.cls.command = type(load_command(PLUGINS, request.param))
        request.cls.calls = calls.get(request.param, ())
