"""`rlhf explain`: sections, the options of one section, one option, and names that are wrong."""

import json
import subprocess
import sys

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_runtime.config.runfile import RunFile


@pytest.fixture
def explain(capsys):
    def call(*words, code=0):
        assert main(["explain", *words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return call


@pytest.fixture
def options(explain):
    """options(*words): {path: its object} of the JSON form."""
    return lambda *words: {row["path"]: row for row in json.loads(explain(*words, "--json"))}


def test_without_a_name_the_sections_are_listed(explain):
    out = explain()
    for name in RunFile.model_fields:
        assert f"[{name}]" in out or f"[{name}.NAME]" in out, name
    assert "[stream.filter]" in out
    rows = {row["section"]: row for row in json.loads(explain("--json"))}
    assert rows["trainer"]["plugin"] == "torch"
    assert all(row["doc"] for row in rows.values())


def test_a_section_has_its_own_options_and_those_of_the_usual_plugin(explain, options):
    out = explain("trainer")
    assert "[trainer]  What computes gradients" in out
    assert "the options below belong to trainer 'torch' (rlhf-plugin-local " in out
    installed = ", ".join(entry.name for entry in Plugins.discover().list("trainer"))
    assert f"installed: {installed}; `rlhf explain trainer --trainer NAME` explains one" in out
    assert "\ntrainer.lr: number >= 0  = 1e-06\n    Peak learning rate of AdamW." in out
    entries = options("trainer")
    assert entries["trainer.use"]["default"] == "torch"
    assert entries["trainer.optimizer"]["allowed"] == ["adamw", "muon"]


def test_flags_choose_the_plugins(options):
    assert "trainer.stage" not in options("trainer")
    for words in (["--trainer.use", "deepspeed"], ["--trainer", "deepspeed"], ["--backend", "ray"]):
        assert options("trainer", *words)["trainer.stage"]["allowed"] == ["0", "1", "2", "3"]
    entries = options("algorithm", "--algo", "dr_grpo")
    assert entries["algorithm.loss.aggregation"]["default"] == "seq_sum_constant"
    assert entries["algorithm.loss.aggregation"]["plugin"].startswith("loss 'ppo'")
    two = options("reward", "--reward", "length", "--reward", "math")
    assert {"reward.0.weight", "reward.0.per_token", "reward.1.column"} <= set(two)


def test_a_run_file_chooses_the_plugins(options, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('algorithm = "sft"\n[trainer]\nuse = "deepspeed"\n')
    assert "trainer.stage" in options("trainer", str(file))
    assert options("algorithm", str(file))["algorithm.loss.use"]["default"] == "nll"


def test_one_option_is_explained_in_full(explain):
    out = explain("trainer.lr")
    for line in ("type           number >= 0", "default        1e-06", "flag           --trainer.lr VALUE"):
        assert f"  {line}\n" in out
    assert "while running  an observer may change it" in out
    assert "resume         must be the same\n" in out
    assert "resume         must be the same, or another path" in explain("policy.model")
    assert "resume         may differ; the run says" in explain("eval.every")
    assert "resume         may differ: it does not" in explain("run.name")
    assert "installed      deepspeed, " in explain("trainer.use")
    lora = explain("trainer.lora.rank")
    assert "default        required if [trainer.lora] is written" in lora


def test_what_may_change_at_a_resume_knows_the_plugins(options):
    entries = options("trainer", "--trainer.use", "deepspeed")
    assert entries["trainer.stage"]["resume"] == "report"
    assert entries["trainer.betas"]["resume"] == "refuse"
    assert entries["trainer.lr"]["live"]
    assert not entries["trainer.betas"]["live"]
    assert options("algorithm", "--algo", "grpo")["algorithm.loss.clip_high"]["resume"] == "refuse"
    assert options("launcher", "--launcher", "ray")["launcher.address"]["resume"] == "report"
    assert options("placement.policy")["placement.NAME.ranks"]["resume"] == "report"


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("reward.weight", ["reward.0.weight"]),
        ("reward.0.weight", ["reward.0.weight"]),
        ("reward.math.weight", ["reward.0.weight"]),
        ("placement.policy.ranks", ["placement.NAME.ranks"]),
        ("placement.ranks", ["placement.NAME.ranks"]),
        ("roles.judge.dtype", ["roles.NAME.dtype"]),
        ("data.train.path", ["data.train.0.path"]),
        ("data.prompt", ["data.prompt"]),
        ("model", ["policy.model"]),
        ("seed", ["run.seed"]),
    ],
)
def test_entries_and_short_flags_are_found(options, name, paths):
    assert list(options(name, "--reward", "math")) == paths


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainr"], "no section or option 'trainr'. Did you mean 'trainer'? `rlhf explain` lists the sections."),
        (["lr"], "no section or option 'lr'. Did you mean trainer.lr? `rlhf explain` lists"),
        (["trainer.learning_rate"], "[trainer] has no option 'learning_rate'. Did you mean trainer.lr? `rlhf explain"),
        (["run.sed"], "[run] has no option 'sed'. Did you mean 'seed'? `rlhf explain run` lists its options."),
        (["algorithm.loss"], "no plugin of kind algorithm is chosen. Choose one with --algorithm NAME; `rlhf explain"),
        (["reward.extract"], "[reward] has no option 'extract' of its own, and no plugin of kind reward is chosen."),
        (["algorithm", "--algo", "gpro"], "no algorithm named 'gpro'. Did you mean 'grpo'?"),
        (["algorithm", "--algo", "sft", "--algorithm.loss.use", "nl"], "no loss named 'nl'. Did you mean 'nll'?"),
        (["run", "--data.batchsize", "3"], "data.batchsize"),
    ],
)  # fmt: skip
def test_a_wrong_name_gets_the_nearest(explain, words, message):
    code = 2
    assert message in explain(*words, code=code)


def test_sections_without_plugins_are_explained_without_torch():
    code = (
        "import sys; from rlhf_cli.main import main; "
        "main(['explain']); main(['explain', 'data']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse\n")
