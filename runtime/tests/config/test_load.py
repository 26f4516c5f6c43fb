"""Run files and flags: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.config.command_line import SHORT_FLAGS
from rlhf_runtime.config.flag_values import FlagText
from rlhf_runtime.config.load import line_numbers, load, to_toml
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.config.sections import EvalSection


@pytest.fixture
def write(tmp_path):
    def make(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return make


def refused(*args) -> str:
    with pytest.raises(ConfigError) as error:
        load(*args)
    return str(error.value)


def test_file_then_flags(write):
    path = write('algorithm = "rloo"\n[run]\nseed = 1\nsteps = 5\n[sampling]\nstop = ["A", "B"]\n')
    run = load(path, [("run.seed", "7"), ("sampling.temperature", "1")])
    assert (run.run.seed, run.run.steps, run.sampling.stop, run.sampling.temperature) == (7, 5, ("A", "B"), 1.0)


def test_a_run_file_knows_which_options_were_set(write):
    path = write('reward = ["math"]\nalgorithm = {use = "rloo", loss = {clip_low = 0.1}}\nrun.seed = 0\n')
    run = load(path, [("data.train", "a.jsonl"), ("policy.trainer.lr", "0.1")])
    expected = {"run.seed", "algorithm.use", "algorithm.loss.clip_low", "data.train.0.path", "reward.0.use"}
    assert set(run.origins.options) == {*expected, "policy.trainer.lr"}
    flags = [("trainer.lr", "0.1"), ("generator.use", "transformers"), ("launcher", "local")]
    of_usual = {"trainer.lr", "generator.use", "launcher.use"}
    assert set(load(path, flags).origins.options) - expected == of_usual, "nobody wrote trainer.use"
    assert run.model_copy(update={"eval": EvalSection(samples=2)}).origins.options == run.origins.options
    assert RunFile(algorithm="rloo", sampling={"top_k": 5}).origins.options == ("algorithm.use", "sampling.top_k")


def test_a_flag_is_read_by_the_type_of_its_field():
    run = load(
        None,
        [
            ("algorithm", "x"),
            ("run.name", "123"),
            ("run.output", "true"),
            ("run.resume", "true"),
            ("data.template_kwargs.enable_thinking", "false"),
            ("sampling.stop", '["x"]'),
            ("run.epochs", "2"),
        ],
    )
    assert (run.run.name, run.run.output, run.run.resume) == ("123", "true", True)
    assert run.data.template_kwargs == {"enable_thinking": False}
    assert run.sampling.stop == ("x",)
    assert run.run.epochs == 2.0


def test_file_values_are_never_coerced(write):
    message = refused(
        write('algorithm = "x"\n[sampling]\nmax_new_tokens = "5"\ntop_p = true\n[run]\nname = 123\nsteps = 2.0\n')
    )
    assert "sampling.max_new_tokens (run.toml, line 3): should be a valid integer, got string '5'" in message
    assert "sampling.top_p (run.toml, line 4): should be a valid number, got boolean True" in message
    assert "run.name (run.toml, line 6): should be a valid string, got integer 123" in message
    assert "run.steps (run.toml, line 7): should be a valid integer, got float 2.0" in message
    assert "(4 problems)" in message


def test_unknown_keys_of_several_sections_are_reported_at_once(write):
    message = refused(write('algoritm = "x"\nalgorithm = "x"\n[sampling]\ntemprature = 1.0\n[data]\ntran = "f"\n'))
    assert "algoritm (run.toml, line 1): unknown key. Did you mean 'algorithm'? Allowed here: algorithm," in message
    assert "sampling.temprature (run.toml, line 4): unknown key. Did you mean 'temperature'?" in message
    assert "data.tran (run.toml, line 6): unknown key. Did you mean 'train'?" in message
    message = refused(write('algorithm = "x"\n[rewards]\nuse = "x"\n[data]\ntrain = ["f", 3]\n'))
    assert "rewards.use (run.toml, line 3): unknown key. Did you mean the section 'reward'? Allowed here:" in message
    assert "data.train.1 (run.toml, line 5): should be a table, got integer 3." in message


def test_unknown_flag_and_bad_choice():
    message = refused(None, [("algorithm", "x"), ("run.sed", "1"), ("data.template", "chta")])
    assert "run.sed (flag --run.sed): unknown key. Did you mean 'seed'?" in message
    expected = "data.template (flag --data.template): should be 'auto', 'chat' or 'plain', got string 'chta'."
    assert expected + " Did you mean 'chat'?" in message


def test_an_algorithm_is_required_and_the_message_says_how():
    assert "algorithm: required, but not set. Name one with --algo NAME" in refused(None, [("run.seed", "1")])


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("run.steps", "0", "should be greater than 0, got integer 0"),
        ("sampling.temperature", "-1", "should be greater than 0, got float -1.0"),
        ("sampling.top_p", "1.5", "should be less than or equal to 1, got float 1.5"),
        ("data.batch_size", "x", "should be a valid integer, got string 'x'"),
        ("sampling.temperature", "nan", "should be a finite number"),
        ("stream.staleness", "-1", "should be greater than or equal to 0"),
        ("stream.round", "0", "should be greater than 0"),
    ],
)
def test_ranges(key, raw, expected):
    message = refused(None, [("algorithm", "x"), (key, raw)])
    assert f"{key} (flag --{key}): {expected}" in message


@pytest.mark.parametrize("section", ["[algorithm]", "[trainer]", "[rollout]", "[[reward]]"])
def test_options_that_are_no_table(write, section):
    first = "" if section == "[algorithm]" else '[algorithm]\nuse = "sft"\n'
    message = refused(write(f'{first}{section}\nuse = "x"\noptions = 5\n'))
    assert "options" in message
    assert "should be a table, got integer 5" in message


def test_short_forms(write):
    run = load(
        write('algorithm = "rloo"\nreward = ["plugin:math", {use = "length", cap = 3}]\nobserver = ["wandb"]\n'
              'generator = "transformers"\nenv = "game"\n[data]\ntrain = ["a.jsonl", "b/c.jsonl"]\neval = "d.csv"\n')
    )  # fmt: skip
    assert [(r.use, r.options, r.label) for r in run.reward] == [
        ("plugin:math", {}, "math"),
        ("length", {"cap": 3}, "length"),
    ]
    assert [o.use for o in run.observer] == ["wandb"]
    assert (run.generator.use, run.env.use) == ("transformers", "game")
    assert [s.label for s in run.data.train] == ["a", "c"]
    assert [s.path for s in run.data.eval] == ["d.csv"]


def test_list_entries_by_index_and_by_name(write):
    path = write(
        'algorithm = "x"\nreward = ["math"]\n[[data.train]]\npath = "a.jsonl"\n[[data.train]]\npath = "b.jsonl"\n'
    )
    run = load(
        path,
        [
            ("reward.math.weight", "2"),
            ("reward.1.use", "length"),
            ("reward.length.cap", "4"),
            ("data.train.0.probability", "0.25"),
            ("data.train.b.probability", "0.75"),
        ],
    )
    assert [(r.use, r.weight) for r in run.reward] == [("math", 2.0), ("length", 1.0)]
    assert run.reward[1].options == {"cap": "4"}
    assert [s.probability for s in run.data.train] == [0.25, 0.75]


def test_an_index_beyond_the_list_is_refused(write):
    message = refused(
        write('algorithm = "x"\nreward = ["math", "length"]\n'),
        [("reward.lenght.weight", "2"), ("reward.5.weight", "1")],
    )
    assert (
        "--reward.lenght.weight: reward has no entry 'lenght'; its entries are: 0 (math), 1 (length). "
        "Did you mean 'length'?" in message
    )
    assert "--reward.5.weight: reward has no entry '5'" in message


def test_repeated_list_flags_make_a_list_and_replace_a_bare_one(write):
    path = write('algorithm = "x"\nreward = ["math"]\n[data]\ntrain = "a.jsonl"\n')
    run = load(path, [("reward", "length"), ("reward", "format"), ("data.train", '["b.jsonl", "c.jsonl"]')])
    assert [r.use for r in run.reward] == ["length", "format"]
    assert [s.path for s in run.data.train] == ["b.jsonl", "c.jsonl"]


def test_replacing_a_configured_entry_is_an_error_naming_both(write):
    path = write('algorithm = "x"\n[[reward]]\nuse = "math"\nweight = 2.0\n')
    message = refused(path, [("reward", "length")])
    assert "--reward length replaces reward.0 (use = 'math'), for which weight is set (run.toml, line 4)" in message


def test_a_source_of_a_runs_own_file_is_replaced(write):
    """A resolved run file states the defaults of every source."""
    source = '[[data.train]]\npath = "a.jsonl"\nname = ""\nsplit = "train"\n'
    assert load(write(f'algorithm = "x"\n{source}'), [("data.train", "b.jsonl")]).data.train[0].path == "b.jsonl"
    message = refused(write(f'algorithm = "x"\n{source}max_rows = 5\n'), [("data.train", "b.jsonl")])
    assert "replaces data.train.0 (path = 'a.jsonl'), for which max_rows is set (run.toml, line 6)" in message


def test_a_reward_of_a_runs_own_file_is_replaced(write):
    """A resolved run file states the defaults of every reward, among them an empty list."""
    reward = 'algorithm = "x"\n[[reward]]\nuse = "math"\nweight = 1.0\ndeadline = 60.0\nsources = []\n'
    assert [r.use for r in load(write(reward), [("reward", "length")]).reward] == ["length"]
    message = refused(write(f'{reward}column = "solution"\n'), [("reward", "length")])
    assert "replaces reward.0 (use = 'math'), for which column is set (run.toml, line 7)" in message


def test_fields_of_a_replaced_plugin_are_an_error_naming_both(write):
    path = write('[algorithm]\nuse = "grpo"\n[algorithm.loss]\nuse = "ppo"\nclip_high = 0.3\n')
    message = refused(path, [("algorithm.loss.use", "gspo")])
    assert (
        "algorithm.loss.clip_high (run.toml, line 5) was set for 'ppo', which --algorithm.loss.use replaces with 'gspo'"
        in message
    )
    message = refused(path, [("algorithm.use", "rloo")])
    assert "algorithm.loss.clip_high (run.toml, line 5) was set for 'grpo'" in message
    default = write('algorithm = "grpo"\n[algorithm2]\n'.replace("[algorithm2]\n", "")) and write(
        '[algorithm]\nuse = "grpo"\nloss = {clip_high = 0.3}\n'
    )
    assert "was set for the default plugin" in refused(default, [("algorithm.loss.use", "gspo")])


def test_the_same_plugin_again_or_every_field_set_again_is_fine(write):
    path = write('[algorithm]\nuse = "grpo"\n[algorithm.loss]\nuse = "ppo"\nclip_high = 0.3\n')
    assert load(path, [("algorithm.loss.use", "plugin:ppo")]).algorithm.options["loss"]["clip_high"] == 0.3
    run = load(path, [("algorithm.loss.use", "gspo"), ("algorithm.loss.clip_high", "0.1")])
    assert run.algorithm.options["loss"] == {"use": "gspo", "clip_high": "0.1"}


def test_a_section_keeps_its_own_fields_when_its_plugin_changes(write):
    run = load(write('algorithm = "x"\n[[reward]]\nuse = "math"\nweight = 2.0\n'), [("reward.0.use", "length")])
    assert (run.reward[0].use, run.reward[0].weight) == ("length", 2.0)


def test_plugin_options_keep_their_text_until_the_plugin_is_known():
    options = load(None, [("algorithm", "x"), ("algorithm.loss.clip_high", "0.28")]).algorithm.options
    assert isinstance(options["loss"]["clip_high"], FlagText)
    assert options["loss"]["clip_high"].value == 0.28


def test_a_flag_below_a_single_value(write):
    message = refused(
        write('algorithm = "x"\n[run]\nseed = 1\n'), [("run.seed.x", "2"), ("run..x", "1"), ("reward.weight", "2")]
    )
    assert "--run.seed.x: run.seed (run.toml, line 3) is a single value, not a section" in message
    assert "--run..x: a flag is a path of names joined by single dots" in message
    assert "--reward.weight: reward is a list. Did you mean --reward.0.weight?" in message


def test_backend_triple(write):
    run = load(None, [("algorithm", "x"), ("backend", "local")])
    assert (run.launcher.use, run.trainer.use, run.generator.use) == ("local", "torch", "transformers")
    path = write("algorithm = 'x'\n[trainer]\nuse = 'torch'\nlr = 1e-5\n[critic.trainer]\nlr = 2e-5\n")
    run = load(path, [("backend", "fsdp"), ("trainer.shard", "true")])
    assert (run.trainer.use, run.trainer.options) == ("fsdp", {"lr": 1e-5, "shard": "true"})
    assert run.critic.trainer == {"lr": 2e-5}, "the run file's options are those of the run, wherever it runs"
    message = refused(None, [("backend", "loca")])
    assert "--backend loca: unknown backend; available: fsdp, local, processes, " in message
    assert "Did you mean 'local'?" in message


@pytest.mark.parametrize(
    ("text", "flags", "generator"),
    [
        ("", [("algorithm", "dpo")], "transformers"),
        ("[algorithm]\nuse = 'reward_model'\n", [], "transformers"),
        ("algorithm = 'grpo'\n", [("algorithm.use", "sft")], "transformers"),
        ("", [("algorithm", "grpo")], "vllm"),
        ("", [("algorithm", "dpo"), ("reward.0.use", "math")], "vllm"),
        ("algorithm = 'dpo'\n[env]\nuse = 'x'\n", [], "vllm"),
    ],
)
def test_a_backend_without_its_generator_serves_runs_that_sample_nothing(write, text, flags, generator: str) -> None:
    plugins = Plugins(entry for entry in Plugins.discover().list() if entry.name != "vllm")
    run = load(write(text), [*flags, ("backend", "ray")], plugins)
    assert (run.launcher.use, run.trainer.use, run.generator.use) == ("ray", "deepspeed", generator)


def test_options_that_the_trainer_of_a_flag_lacks_are_left_out_of_all_roles_with_a_note(write):
    """As `rlhf replay RUN --trainer.use torch` needs it."""
    tables = {"": "lr = 1.0\noffload = true", "policy.": "", "critic.": "lr = 2.0\noffload = true"}
    tables["roles.judge."] = "reshard_after_forward = 0\nhead_fp32 = true"
    text = "".join(f"[{role}trainer]\n{options}\n" for role, options in tables.items())
    left_out: list[str] = []
    path = write(text.replace("[trainer]", '[trainer]\nuse = "fsdp"'))
    run = load(path, [("algorithm", "ppo"), ("trainer.use", "torch")], left_out=left_out)
    assert (run.trainer.use, run.trainer.options) == ("torch", {"lr": 1.0})
    assert (run.critic.trainer, run.roles["judge"].trainer) == ({"lr": 2.0}, {"head_fp32": True})
    names = [text.partition(" = ")[0] for text in left_out]
    assert names == ["trainer.offload", "critic.trainer.offload", "roles.judge.trainer.reshard_after_forward"]


def test_short_flags_lead_to_places_that_exist():
    values = {"seed": "3", "steps": "4", "resume": "true", "overwrite": "true", "backend": "local"}
    run = load(None, [(target, values.get(flag, f"v-{flag}")) for flag, target in SHORT_FLAGS.items()])
    assert (run.algorithm.use, run.policy.model, run.run.output, run.run.seed) == ("v-algo", "v-model", "v-output", 3)
    assert (run.run.steps, run.run.resume, run.data.eval[0].path, run.reward[0].use) == (
        4,
        True,
        "v-eval-data",
        "v-reward",
    )


def test_missing_unreadable_and_invalid_files(tmp_path, write):
    (tmp_path / "rloo.toml").write_text("")
    message = refused(str(tmp_path / "rlo.toml"))
    assert f"the run file {tmp_path / 'rlo.toml'} does not exist. TOML files in {tmp_path}: " in message
    assert ": rloo.toml. Did you mean 'rloo.toml'?" in message
    assert "is not valid TOML: " in (message := refused(write("a = [1,\nb = 2\n")))
    assert "line 2" in message
    assert "--data FILE" not in message
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\xff")
    for name in ("rows.jsonl", "rows.parquet"):
        assert refused(str(tmp_path / name)).endswith("To pass a file of rows, use --data FILE.")
    assert "cannot read the run file" in (message := refused(str(tmp_path)))
    assert "--model" not in message
    (tmp_path / "config.toml").write_text("")
    assert f"is {tmp_path}/config.toml; its model is --model {tmp_path}/model." in refused(str(tmp_path))


def test_secrets_are_refused_and_not_repeated(write):
    message = refused(
        write(
            'algorithm = "x"\n[[reward]]\nuse = "judge"\napi_key = "abcdefgh"\n'
            'url = "https://me:pw12@host/x"\n[[observer]]\nuse = "wandb"\n'
            'project = "hf_ABCDEFGHIJKLMNOPQRSTU"\n'
        )
    )
    assert "reward.0.api_key (run.toml, line 4): looks like a secret" in message
    assert "reward.0.url" in message
    assert "observer.0.project" in message
    assert "environment variable" in message
    assert not [secret for secret in ("abcdefgh", "pw12", "hf_A") if secret in message]


def test_names_that_only_look_like_secrets_pass(write):
    text = (
        'algorithm = "x"\n[[reward]]\nuse = "judge"\napi_key_env = "KEY"\nstop_token = "###"\n'
        'eos_token = "x"\ntoken_level = "a"\n'
    )
    assert len(load(write(text)).reward[0].options) == 4


def test_two_sections_of_one_name(write):
    message = refused(write('algorithm = "x"\nreward = ["math", "plugin:math"]\n'))
    assert message.endswith("(1 problem):\n  reward: two are named 'math'; give one of them another `name`")
    assert "data.train: two sources are named 'a'" in refused(
        write('algorithm = "x"\n[data]\ntrain = ["x/a.jsonl", "y/a.csv"]\n')
    )


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((0.5, None), r"\['b'\] have none"), ((0.5, 0.4), "must sum to 1, got .*which sum to 0.9")],
)
def test_probabilities(shares, expected):
    flags = [("algorithm", "x"), ("data.train", "a.jsonl"), ("data.train", "b.jsonl")]
    flags += [(f"data.train.{i}.probability", str(p)) for i, p in enumerate(shares) if p is not None]
    with pytest.raises(ConfigError, match=expected):
        load(None, flags)


def test_resolved_toml_reads_back_equal(write, tmp_path):
    run = load(
        write(
            'algorithm = {use = "grpo", kl = 0.1, loss = {use = "ppo", clip = [0.1, 0.2]}}\n'
            'reward = [{use="file:r.py:f", weight=2, name="r"}]\n'
              '[data]\ntrain = [{path="a.jsonl", probability=1.0}]\n'
              'template_kwargs = {enable_thinking = false}\n[stream]\nfilter = {low = 0.1}\n'
              '[roles.judge]\nmodel = "m"\n[critic.trainer]\nlr = 1e-5\n[env]\nuse = "game"\nlevel = "a\\"b\\nc"\n')
    )  # fmt: skip
    text = to_toml(run)
    copy = tmp_path / "config.toml"
    copy.write_text(text)
    assert load(str(copy)) == run
    assert to_toml(load(str(copy))) == text
    assert "temperature = 1.0" in text  # defaults are there


def test_secrets_in_the_list_of_a_flag_are_refused_and_not_repeated():
    flags = [("algorithm", "x"), ("rollout.use", "tools"), ("rollout.mcp.a.command", '["run", "--api-key=abcdefgh"]')]
    with pytest.raises(ConfigError, match=r"rollout\.mcp\.a\.command\.1 .*: looks like a secret") as caught:
        load(None, flags)
    assert "abcdefgh" not in str(caught.value)


def test_to_toml_refuses_secrets():
    run = load(None, [("algorithm", "x")])
    run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update={"options": {"password": "x"}})})
    with pytest.raises(ConfigError, match=r"algorithm\.password: looks like a secret"):
        to_toml(run)


def test_line_numbers_of_nested_tables_lists_and_multi_line_text():
    text = 'a = """\nx = 1\n"""\n[b.c]\n"d" = 1\n[[e]]\nf = 1\n[[e]]\nf = 2\n[e.g]\nh.i = 3\n'
    assert line_numbers(text) == {
        "a": 1,
        "b.c": 4,
        "b.c.d": 5,
        "e.0": 6,
        "e.0.f": 7,
        "e.1": 8,
        "e.1.f": 9,
        "e.1.g": 10,
        "e.1.g.h.i": 11,
    }


# ------------------------------------------------------------------------------- values given in Python


def load_options(**options):
    from rlhf_runtime.config.flag_values import PythonValue

    return load(None, [(name.replace("__", "."), PythonValue(value)) for name, value in options.items()])


def test_a_value_given_in_python_is_not_converted():
    run = load_options(
        algorithm="grpo", trainer__lr=1e-5, run__seed=3, run__name="3", eval__every=None, sampling__stop=["x"]
    )
    assert (run.algorithm.use, run.trainer.options["lr"], run.run.seed, run.run.name) == ("grpo", 1e-5, 3, "3")
    assert (run.eval.every, run.sampling.stop) == (None, ("x",))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"run__seed": "3"}, r"run\.seed \(option 'run\.seed'\)"),  # a flag's text would be read as a number
        ({"run__seed": 3.0}, r"run\.seed \(option 'run\.seed'\)"),
        ({"run__sed": 3}, r"run\.sed \(option 'run\.sed'\).*Did you mean"),
        ({"run": {"seed": 3}}, r"\[run\] is a section"),
        ({"algorithm__use": 3}, r"algorithm\.use \(option 'algorithm\.use'\)"),
        ({"data__train": [3]}, r"data\.train"),
        (
            {"data__template_kwargs": {"x": {"y": ["a", None]}}},
            r"data\.template_kwargs\.x\.y \(.*TOML has no null, got list",
        ),
    ],
)
def test_a_wrong_value_given_in_python_is_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        load_options(**{"algorithm": "grpo", **options})


def test_lists_given_in_python_are_texts_or_tables():
    run = load_options(
        algorithm="grpo", reward=["math", {"use": "length", "weight": 0.5}], data__train=[{"path": "a.jsonl"}]
    )
    assert [(r.use, r.weight) for r in run.reward] == [("math", 1.0), ("length", 0.5)]
    assert run.data.train[0].path == "a.jsonl"


def test_a_placeholder_that_is_left_is_refused_with_its_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        'algorithm = "sft"\n[policy]\nmodel = "<fill in: a folder>"\n[data]\ntrain = ["a.jsonl", "<fill in: a file>"]\n'
        'system = "<fill in the blank>"\nbatch_size = "x"\n'
    )
    with pytest.raises(ConfigError) as refused:
        load(str(file))
    assert str(refused.value) == (
        "the run file is not filled in (2 problems):\n"
        "  policy.model (run.toml, line 3): still holds the placeholder '<fill in: a folder>'. Write a value in its "
        "place, or give --policy.model VALUE.\n"
        "  data.train.1.path (run.toml, line 5): still holds the placeholder '<fill in: a file>'. Write a value in its "
        "place, or give --data.train.1.path VALUE."
    )
    filled = [("policy.model", "m"), ("data.train", "b.jsonl"), ("data.batch_size", "3")]
    assert load(str(file), filled).data.system == "<fill in the blank>"
