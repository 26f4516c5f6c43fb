"""What a name that nothing reads may mean: options of the run, and what other frameworks call them."""

from __future__ import annotations

from functools import cache

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_runtime.config.load import load
from rlhf_runtime.config.other_frameworks import OTHER_NAMES
from rlhf_runtime.config.sections import Choice
from rlhf_runtime.config.suggestions import Suggestions


@cache
def all_options() -> set[str]:
    """Every option of every installed plugin, and of the run file's sections."""
    plugins = Plugins.discover()
    kinds = [e for e in plugins.list() if e.kind in ("algorithm", "trainer", "generator", "rollout", "env", "launcher")]
    chosen = [(e.kind, e.kind, Choice(use=f"{e.distribution}/{e.name}")) for e in kinds]
    lists = [e for e in plugins.list() if e.kind in ("reward", "observer")]
    chosen += [(e.kind, f"{e.kind}.0", Choice(use=f"{e.distribution}/{e.name}")) for e in lists]
    return set(Suggestions(plugins, chosen).options)


@pytest.mark.slow
def test_every_suggested_option_exists():
    for owner in ("rlhf_plugin_deepspeed", "rlhf_plugin_vllm"):
        pytest.importorskip(owner)
    options = all_options()
    assert len(options) > 300
    assert {name: o for name, names in OTHER_NAMES.items() for o in names if o not in options} == {}


def test_no_option_of_ours_is_taken_for_another_frameworks_name():
    assert {name for name in OTHER_NAMES if "." in name} & all_options() == set()


@cache
def suggestions(algorithm: str) -> Suggestions:
    chosen = [("algorithm", "algorithm", Choice(use=algorithm)), ("trainer", "trainer", Choice(use="torch"))]
    return Suggestions(Plugins.discover(), chosen)


@pytest.mark.parametrize(
    ("algorithm", "path", "expected"),
    [
        ("grpo", "lr", "--trainer.lr"),
        ("grpo", "batch-size", "--data.batch_size"),
        ("grpo", "max_completion_length", "--sampling.max_new_tokens"),
        ("grpo", "sampling.num_generations", "--sampling.samples_per_prompt"),
        ("grpo", "algorithm.beta", "--algorithm.kl.coef"),
        ("dpo", "algorithm.beta", "--algorithm.loss.beta"),
        ("grpo", "policy.lr", "--policy.trainer.lr or --trainer.lr"),
        ("grpo", "actor.adam.lr", "--trainer.lr"),
        ("ppo", "critic.adam.lr", "--critic.trainer.lr"),
        ("ppo", "critic_learning_rate", "--critic.trainer.lr"),
        ("grpo", "ds.lora.rank", "--trainer.lora.rank"),
        ("grpo", "rollout.n_samples_per_prompt", "--sampling.samples_per_prompt"),
        ("grpo", "rollout_batch_size", "--data.batch_size"),
        ("grpo", "init_kl_coef", "--algorithm.kl.coef"),
        ("grpo", "learning_rat", "--trainer.lr"),
        ("sft", "max_epochs", "--run.epochs"),
        ("grpo", "qqq", ""),
    ],
)
def test_names_of_other_frameworks_are_suggested(algorithm, path, expected):
    """Only what the run at hand has is suggested."""
    assert suggestions(algorithm).suggest(path, (), True) == (expected and f" Did you mean {expected}?")


@pytest.mark.parametrize(
    ("algorithm", "path", "option"),
    [
        ("sft", "init_kl_coef", "--algorithm.kl.coef"),
        ("grpo", "vllm_gpu_memory_utilization", "--generator.memory_share"),
    ],
)
def test_an_option_that_other_plugins_have_is_named_as_theirs(algorithm, path, option):
    expected = f" The corresponding option is {option}, which the plugins of this run do not have."
    assert suggestions(algorithm).suggest(path, (), True) == expected


def test_a_misspelt_name_of_its_own_section_comes_first():
    index = suggestions("grpo")
    assert index.suggest("sampling.temprature", ["temperature", "top_p"], False) == " Did you mean 'temperature'?"
    hint = index.suggest("sampling.max_tokens", ["max_new_tokens", "top_p"], False)
    assert hint == " Did you mean sampling.max_new_tokens or data.max_tokens?"


def refused(*flags: tuple[str, str | None]) -> str:
    with pytest.raises(ConfigError) as error:
        load(None, [("algorithm", "grpo"), *flags])
    return str(error.value)


def test_problems_of_sections_and_plugins_come_at_once():
    message = refused(("trainer.lr", "fast"), ("data.batch_size", "8.5"), ("algorithm.beta", "1"), ("policy.lr", "1"))
    for part in (
        "  data.batch_size (flag --data.batch_size): should be a valid integer, got float 8.5.",
        "\n    trainer.lr (flag --trainer.lr): should be a valid number, got string 'fast'.",
        "algorithm.beta (flag --algorithm.beta): unknown key. Did you mean --algorithm.kl.coef?\n",
        "policy.lr (flag --policy.lr): unknown key. Did you mean --policy.trainer.lr or --trainer.lr?\n",
    ):
        assert part in message


def test_names_below_an_unknown_section_are_each_answered():
    message = refused(("actor.adam.lr", "1"), ("actor.eps_clip", "0.2"), ("reward.remote_url", "x"))
    assert "actor.adam.lr (flag --actor.adam.lr): unknown key. Did you mean --trainer.lr?" in message
    assert "Did you mean --algorithm.loss.clip_low or --algorithm.loss.clip_high?" in message
    assert "--reward.remote_url: reward is a list. Did you mean --reward?" in message


def test_a_flag_without_a_value():
    run = load(None, [("algorithm", "x"), ("run.resume", None), ("data.template_kwargs.thinking", None)])
    assert (run.run.resume, run.data.template_kwargs) == (True, {"thinking": True})
    message = refused(("run.steps", None), ("trainer.lr", None), ("observer", None), ("data.template", None))
    assert "run.steps (flag --run.steps): needs a value, which should be a valid integer." in message
    assert (
        "trainer.lr (flag --trainer.lr): needs a value, which should be a valid number, e.g. --trainer.lr 1e-06."
        in message
    )
    assert "--observer needs a value: --observer NAME." in message
    assert "data.template (flag --data.template): needs a value, which should be 'auto', 'chat' or 'plain'" in message


def test_pythons_booleans_are_read_on_flags():
    flags = [
        ("run.resume", "True"),
        ("data.shuffle", "False"),
        ("run.name", "True"),
        ("data.template_kwargs.x", "False"),
    ]
    run = load(None, [("algorithm", "x"), *flags])
    assert (run.run.resume, run.data.shuffle, run.run.name) == (True, False, "True")
    assert run.data.template_kwargs == {"x": False}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("algorithm = grpo", ' Text is quoted: "grpo".'),
        ("[policy]\nmodel = Qwen/Qwen3-0.6B  # small", ' Text is quoted: "Qwen/Qwen3-0.6B".'),
        ("[run]\nname = 7b model", ' Text is quoted: "7b model".'),
        ("reward = [math, format]", ' Text is quoted: "math".'),
        ("[run]\nresume = True", " TOML's booleans are written true and false, got True."),
        ("[sampling]\ntop_k = None", " TOML has no None: remove the line."),
        ("a = [1,\nb = 2", ""),
        ('a = "b', ""),
    ],
)
def test_invalid_toml_gets_advice(tmp_path, text, hint):
    path = tmp_path / "run.toml"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match="is not valid TOML: ") as error:
        load(str(path))
    assert str(error.value).endswith(f").{hint}")
