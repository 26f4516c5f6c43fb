"""`rlhf completion`: what bash completes with the script, and what the script needs."""

import contextlib
import importlib.util
import os
import pty
import subprocess
import sys

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.completion import whole_parser
from rlhf_cli.main import command_names, main

needs_shtab = pytest.mark.skipif(
    importlib.util.find_spec("shtab") is None, reason="shtab is not installed: pip install shtab"
)
COMPLETE = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p rlhf | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "rlhf.bash"
    with file.open("w") as out, contextlib.redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    return file


@pytest.fixture
def complete(script, tmp_path):
    """complete("train", "--al"): what bash offers for the last word. No Python is on the path."""

    def call(*words):
        quoted = " ".join(f"'{word}'" for word in ("rlhf", *words))
        done = subprocess.run(
            ["/usr/bin/env", "bash", "--norc", "-c", COMPLETE.format(script=script, words=quoted)],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin"},
        )
        return [word for word in done.stdout.splitlines() if word]

    return call


@needs_shtab
def test_commands_and_actions(complete):
    assert set(complete("")) >= set(command_names(Plugins.discover()))
    assert complete("tr") == ["train"]
    assert complete("plugins", "") == ["list", "show", "new", "check", "isolate"]
    assert complete("data", "pre") == ["preview"]


@needs_shtab
def test_flags_and_options_of_the_run_file_and_of_plugins(complete):
    assert complete("train", "--dry") == ["--dry-run"]
    assert complete("train", "--trainer.l") == [
        "--trainer.lr",
        "--trainer.lora.rank",
        *complete("train", "--trainer.lo")[1:],
    ]
    assert "--algorithm.loss.clip_high" in complete("train", "--algo", "grpo", "--algorithm.loss.")
    assert "--reward.0.weight" in complete("plan", "run.toml", "--reward.0.")
    assert "--placement.policy.ranks" in complete("plan", "--placement.")
    assert complete("train", "--algorithm.members.") == complete("train", "--rollout.mcp.") == [], "a name of the user"
    assert complete("data", "preview", "--run.se") == ["--run.seed"]
    assert complete("runs", "--trainer.l") == [], "a command that reads no run file"


@needs_shtab
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["train", "--algo", "gr"], ["grpo"]),
        (["train", "--model", "m", "--reward", "ma"], ["math"]),
        (["train", "--backend", "lo"], ["local"]),
        (["train", "--trainer.use", "d"], ["deepspeed"]),
        (["train", "--trainer.optimizer", ""], ["adamw", "muon"]),
        (["train", "--run.resume", ""], ["true", "false"]),
        (["plugins", "show", "grp"], ["grpo"]),
        (["plugins", "new", "x", "--kind", "roll"], ["rollout"]),
        (["explain", "trainer.lr"], ["trainer.lr"]),
        (["explain", "--algo", "sf"], ["sft"]),
        (["init", "--env", "num"], ["number_game"]),
        (["completion", "z"], ["zsh"]),
        (["train", "--algorithm.loss.loss_type", "s"], ["sigmoid", "simpo", "sppo_hard", "sft", "sigmoid_norm"]),
        (["train", "--reward.0.mode", ""], ["fullmatch", "search", "rubric", "pairwise"]),
        (["train", "--reward.0.extract", ""], []),
    ],
)
def test_values(complete, words, offered):
    assert complete(*words) == offered


@needs_shtab
def test_files_and_folders(complete, tmp_path):
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "run.toml").touch()
    assert set(complete("train", "run")) == {"run.toml", "runs"}
    assert complete("show", "runs/") == ["runs/1"]
    assert complete("train", "--data", "run.") == ["run.toml"]
    assert complete("samples", "runs/1", "--worst", "run") == [], "a number, no file"


@needs_shtab
def test_the_tab_key_in_an_interactive_bash(script, tmp_path):
    """Types a line with two Tab keys, goes to its beginning, puts `echo` there and presses Enter."""
    keys = f"source {script}\nrlhf tra\t--dry\t\x01echo typed: \n exit\n"
    controller, terminal = pty.openpty()
    environment = {"PATH": "/usr/bin:/bin", "TERM": "dumb", "HOME": str(tmp_path)}
    bash = subprocess.Popen(
        ["/usr/bin/env", "bash", "--norc", "--noprofile", "-i"],
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True,
    )  # fmt: skip
    os.write(controller, keys.encode())
    out, _ = bash.communicate(timeout=120)
    os.close(controller)
    os.close(terminal)
    assert b"typed: rlhf train --dry-run" in out


@needs_shtab
def test_a_script_for_zsh(capsys):
    assert main(["completion", "zsh"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("#compdef rlhf")
    assert '"--trainer.lr[Peak learning rate of AdamW' in out


def test_every_command_and_action_has_its_arguments():
    [commands] = [a.choices for a in whole_parser(Plugins.discover())._actions if isinstance(a.choices, dict)]
    assert set(commands) == set(command_names(Plugins.discover()))
    assert "--trainer.lr" in commands["train"]._option_string_actions
    assert "--trainer.lr" not in commands["samples"]._option_string_actions


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "completion needs shtab, which is not installed. Try: pip install shtab" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["completion", "fish"])
    assert "invalid choice: 'fish' (choose from" in capsys.readouterr().err
