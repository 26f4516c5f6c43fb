"""`rlhf init`: the file that it writes can be used as soon as its placeholders are filled in, for every algorithm."""

import json
import re
import tomllib

import pytest
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_cli.options.run_file import toml
from rlhf_runtime.config.components import Selections
from rlhf_runtime.config.load import load
from rlhf_testing.tiny import tiny_model

ALGORITHMS = sorted({entry.name for entry in Plugins.discover().list("algorithm")})
FORMS = ("distill", "dpo", "grpo", "kto", "per_source", "ppo", "prm", "sft")
"""Algorithms that differ in the rows, roles or members that ``init`` writes."""
ROWS = {
    "prompts": {"prompt": "1+1=", "answer": "2"},
    "demonstrations": {"prompt": "1+1=", "response": "2"},
    "pairs": {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
    "labels": {"prompt": "1+1=", "response": "2", "label": True},
    "steps": {"prompt": "1+1=", "completions": ["1", "2"], "labels": [True, False]},
}
THIRD_PARTY = '''
from rlhf.interfaces import Algorithm, ComponentConfig
from rlhf.types import Needs, RoleSpec

class Copying(Algorithm):
    """Learns to copy."""
    name = "copying"
    data = "labels"

    class Config(ComponentConfig):
        strength: float
        """How strong. Of something."""
        mode: str = 'so "quoted"'
        """In which way."""

    def needs(self):
        roles = (RoleSpec("policy", trained=True), RoleSpec("judge"))
        return Needs(roles, rows_min=20)

    def assemble(self, examples):
        return None, {}
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for form, row in ROWS.items():
        rows = [row | {"label": n % 2 == 0} if form == "labels" else row for n in range(20)]
        (tmp_path / f"{form}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    def call(*words, code=0):
        assert main(list(map(str, words))) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return call


def required_flags(algorithm, model):
    """Flags that fill in what only a person knows."""
    cls = Plugins.discover().resolve("algorithm", algorithm).cls
    words = ["--model", model, "--data", f"{cls.data}.jsonl"]
    words += ["--reward", "math"] if cls.data == "prompts" and algorithm != "distill_on_policy" else []
    words += ["--algorithm.members.all.use", "grpo", "--algorithm.members.all.sources", '["prompts"]'] * (
        algorithm == "per_source"
    )
    return words + (["--roles.teacher.model", model] if algorithm.startswith("distill") else [])


@pytest.mark.parametrize("algorithm", FORMS)
def test_the_file_of_an_algorithm_can_be_trained_once_it_is_filled_in(call, folder, model, algorithm):
    call("init", "--algo", algorithm, *required_flags(algorithm, model), "-o", "run.toml")
    text = (folder / "run.toml").read_text()
    assert "<fill in: " not in text
    call("train", "run.toml", "--dry-run")
    assert tomllib.loads(text)["algorithm"]["use"] == algorithm


@pytest.mark.parametrize("algorithm", ["grpo", "distill"])
def test_placeholders_can_be_filled_in_by_flags_too_and_are_refused_where_they_are_left(call, folder, model, algorithm):
    call("init", "--algo", algorithm, "-o", "run.toml")
    left = re.findall(r'^(\w+) = "<fill in: ', (folder / "run.toml").read_text(), re.MULTILINE)
    output = call("train", "run.toml", "--dry-run", code=2)
    assert f"the run file is not filled in ({len(left)} problem" in output
    assert left.count("train") == 1
    for name in left:
        assert re.search(
            rf"\.{name}(\.0\.path)? \(run.toml, line \d+\): still holds the placeholder '<fill in: ", output
        )
    call("train", "run.toml", "--dry-run", *required_flags(algorithm, model))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_comments_hold_defaults(call, folder, model, algorithm):
    """A run with all of them is the run without them."""
    call("init", "--algo", algorithm, *required_flags(algorithm, model), "--backend", "ray", "-o", "run.toml")
    text = (folder / "run.toml").read_text()
    explicit, count = re.subn(r"^#([\w.]+ = (?! ))", r"\1", text, flags=re.MULTILINE)
    assert count > 20
    (folder / "stated.toml").write_text(explicit)
    plugins = Plugins.discover()
    runs = [Selections.of(plugins, load(name)).config.model_dump() for name in ("run.toml", "stated.toml")]
    for run in runs:
        run["run"].pop("output")
        run["placement"] = {name: place for name, place in run["placement"].items() if place["share"]}
    assert runs[0] == runs[1]


def test_every_line_says_what_it_is_and_none_is_long(call):
    text = call("init", "--algo", "grpo", "--reward", "math", "--env", "number_game", "--backend", "ray")
    for line in text.splitlines():
        assert len(line) <= 120 or " = " in line, line
        if re.match(r"#?[\w.]+ =", line):
            assert "  # " in line, line
    assert re.search(r"^#steps = +# integer > 0, <= 1e\+07; \w+", text, re.MULTILINE)
    assert re.search(r"^#output = +# text; The run directory; if not set, the next of `runs/1`", text, re.MULTILINE)
    assert re.search(r"^#lr = 1e-06 +# Peak learning rate of AdamW\.$", text, re.MULTILINE)
    assert re.search(r"^use = \"math\" +# installed: code, format, http, judge, length, math", text, re.MULTILINE)


def test_what_an_algorithm_needs_is_written_as_a_value(call):
    grpo = tomllib.loads(call("init", "--algo", "grpo"))
    assert grpo["sampling"] == {"samples_per_prompt": 8}
    assert grpo["reward"][0]["use"].startswith("<fill in: a reward: code, format, http, judge, length, math")
    assert "value_loss" not in grpo["algorithm"], "GRPO trains no critic"
    ppo = call("init", "--algo", "ppo")
    assert "[algorithm.value_loss]" in ppo
    assert "[critic]" in ppo
    sft = tomllib.loads(call("init", "--algo", "sft"))
    assert {"sampling", "stream", "reward"}.isdisjoint(sft)
    assert tomllib.loads(call("init", "--algo", "distill"))["roles"]["teacher"]["model"].startswith(
        "<fill in: a folder"
    )
    assert tomllib.loads(call("init", "--algo", "grpo", "--env", "number_game"))["rollout"]["use"] == "multi_turn"


def test_what_flags_give_is_written(call):
    words = ["--algo", "grpo", "--model", "m", "--data", "a.jsonl", "--data", "b.jsonl", "--backend", "ray"]
    words += ["--reward", "math", "--reward.math.weight", "2", "--reward.0.column", "7", "--algorithm.loss", "gspo"]
    words += ["--trainer.stage", "3", "--policy.trainer.lr", "1e-5", "--placement.policy.ranks", "2", "--seed", "3"]
    words += ["--data.template_kwargs.enable_thinking", "false", "--observer", "wandb"]
    words += ["--sampling.stop", '["?", "\\n"]']
    run = tomllib.loads(call("init", *words, "--stream.filter.low", "0"))
    assert run["run"] == {"seed": 3}
    assert run["reward"] == [{"use": "math", "weight": 2, "column": "7"}]
    assert run["algorithm"]["loss"] == {"use": "gspo"}
    assert run["policy"] == {"model": "m", "trainer": {"lr": 1e-5}}
    assert run["data"] == {"train": ["a.jsonl", "b.jsonl"], "template_kwargs": {"enable_thinking": False}}
    assert run["sampling"] == {"samples_per_prompt": 8, "stop": ["?", "\n"]}
    assert run["trainer"] == {"use": "deepspeed", "stage": 3}
    assert (run["launcher"], run["generator"]) == ({"use": "ray"}, {"use": "vllm"})
    assert run["placement"] == {"policy": {"ranks": 2}, "generator": {}}
    assert run["observer"] == [{"use": "wandb"}]
    assert run["stream"] == {"filter": {"low": 0}}
    rows = call("init", "--algo", "sft", "--data", "a.jsonl", "--data.train.0.max_rows", "9")
    assert tomllib.loads(rows)["data"]["train"] == [{"path": "a.jsonl", "max_rows": 9}]


@pytest.mark.parametrize(
    ("words", "returns_reward", "reward"),
    [
        ([], True, False),
        (["--rollout.returns_reward", "true"], True, False),
        (["--rollout.returns_reward", "false"], False, True),
        (["--reward", "math"], None, True),
    ],
)
def test_a_rollout_that_can_give_the_reward_gives_it_where_none_is_named(call, folder, words, returns_reward, reward):
    (folder / "agent.py").write_text("def run(task, base_url, api_key): ...\n")
    model = tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1, chat_template="default")
    agent = ["--rollout.use", "agent", "--rollout.program", "file:agent.py:run"]
    call("init", "--algo", "rloo", *agent, *words, "--model", model, "--data", "prompts.jsonl", "-o", "run.toml")
    run = tomllib.loads((folder / "run.toml").read_text())
    assert (run["rollout"].get("returns_reward"), "reward" in run) == (returns_reward, reward)
    call("train", "run.toml", "--dry-run", code=2 if words == ["--rollout.returns_reward", "false"] else 0)


def test_a_rollout_that_always_gives_the_reward_needs_none(call):
    run = tomllib.loads(call("init", "--algo", "rloo", "--rollout.use", "verifiers", "--rollout.id", "gsm8k"))
    assert "reward" not in run


def test_a_required_option_of_a_reward_gets_a_placeholder(call):
    assert tomllib.loads(call("init", "--algo", "grpo", "--reward", "model"))["reward"] == [
        {"use": "model", "model": "<fill in: a folder, or a name on the hub>"}
    ]


def test_an_algorithm_of_a_third_party_is_read_off_its_declarations(call, folder, model):
    (folder / "copying.py").write_text(THIRD_PARTY)
    message = call("init", "--algo", "file:copying.py", code=2)
    assert "algorithm.strength: required, but not set. Set it with --algorithm.strength VALUE." in message
    text = call("init", "--algo", "file:copying.py", "--algorithm.strength", "2", "--model", model)
    assert text.startswith("# A run of the algorithm copying. Learns to copy.\n")
    assert re.search(r"^strength = 2 +# How strong\.$", text, re.MULTILINE)
    assert re.search(r'^#mode = "so \\"quoted\\"" +# In which way\.$', text, re.MULTILINE)
    run = tomllib.loads(text)
    assert run["data"]["batch_size"] == 20
    assert run["roles"] == {"judge": {"model": "<fill in: a folder, or a name on the hub>"}}


def test_a_file_that_exists_is_kept(call, folder):
    assert call("init", "--algo", "sft", "-o", "run.toml") == "wrote run.toml; next: rlhf train run.toml --dry-run\n"
    text = (folder / "run.toml").read_text()
    assert "run.toml exists; --force replaces it" in call("init", "--algo", "dpo", "-o", "run.toml", code=2)
    assert (folder / "run.toml").read_text() == text
    call("init", "--algo", "dpo", "-o", "run.toml", "--force")
    assert (folder / "run.toml").read_text() != text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "algorithm: required, but not set. Name one with --algo NAME"),
        (["--algo", "gpro"], "no algorithm named 'gpro'. Did you mean 'grpo'?"),
        (["--algo", "sft", "-o", "no/run.toml"], "there is no folder no to write run.toml into"),
        (["--algo", "sft", "-o", "."], "--output . is a folder"),
        (["--algo", "sft", "--seed", "x"], "run.seed (flag --run.seed): should be a valid integer"),
        (
            ["--algo", "sft", "--algorithm.loss.clip", "1"],
            "algorithm.loss.clip (flag --algorithm.loss.clip): unknown key",
        ),
        (["--algo", "grpo", "--reward", "mth"], "no reward named 'mth'. Did you mean 'math'?"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_written(call, folder, words, message):
    assert message in call("init", *words, code=2)
    assert not list(folder.glob("*.toml"))


@pytest.mark.parametrize(
    "value", [True, 3, 1e-6, 0.1, 'a "b" \\ \n\x7f é', ["a", 1], {"a b": [1.5], "c": {"d": False}}]
)
def test_values_are_written_as_toml(value):
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value
