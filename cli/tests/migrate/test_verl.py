"""Commands of verl's main_ppo become run files that do the same."""

import json
import tomllib
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_cli.migrate.find import migrate
from rlhf_testing.tiny import CHAT_TEMPLATE, tiny_model

PLUGINS = Plugins.discover()
A = "actor_rollout_ref"
SCRIPT = """set -x
gsm8k=$DATA/gsm8k/train.parquet
math=$DATA/math/train.parquet
files="['$gsm8k', '$math']"

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.train_files="$files" +trainer.logger='["console","wandb"]' \\
    trainer.total_epochs=15 $@
"""


def values(overrides=""):
    command = f"python3 -m verl.trainer.main_ppo {A}.model.path=M data.train_files=d.parquet {overrides}"
    return tomllib.loads(migrate("verl", command, {}, PLUGINS))


def test_batches_are_counted_in_prompts():
    run = values(f"data.train_batch_size=512 {A}.actor.ppo_mini_batch_size=128 {A}.rollout.n=5 {A}.actor.ppo_epochs=2")
    assert run["data"]["batch_size"] == 512
    assert run["sampling"]["samples_per_prompt"] == 5
    assert run["algorithm"]["minibatches"] == 4
    assert run["algorithm"]["epochs"] == 2
    with pytest.raises(ConfigError, match="ppo_mini_batch_size"):
        values(f"data.train_batch_size=512 {A}.actor.ppo_mini_batch_size=100")
    assert "minibatches" not in values(f"data.train_batch_size=8 {A}.actor.ppo_mini_batch_size=16")["algorithm"]


def test_defaults_that_differ_are_written():
    run = values()
    assert run["algorithm"]["loss"] == {"dual_clip": 3.0}
    assert run["trainer"] == {"use": "fsdp", "weight_decay": 0.01, "betas": [0.9, 0.999]}
    assert run["critic"]["trainer"] == {"lr": 1e-5}
    assert run["critic"]["model"] == "M"
    assert run["run"]["epochs"] == 30
    assert (run["data"]["max_prompt_tokens"], run["sampling"]["max_new_tokens"], run["data"]["max_tokens"]) == (
        512,
        512,
        1024,
    )
    assert run["placement"]["policy"] == {"ranks": 8}
    assert run["placement"]["generator"] == {"ranks": 4, "devices": 2, "share": "policy"}
    assert [observer["use"] for observer in run["observer"]] == ["wandb"]


@pytest.mark.parametrize(
    ("overrides", "part", "expected"),
    [
        ("algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False", "advantage", {"std": "none"}),
        ("algorithm.adv_estimator=remax", "advantage", {"use": "remax"}),
        ("algorithm.adv_estimator=opo", "advantage", {"use": "opo"}),
        (
            f"{A}.actor.use_kl_loss=True {A}.actor.kl_loss_type=low_var_kl",
            "kl",
            {"coef": 0.001, "where": "loss", "estimator": "k3"},
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.adv_estimator=rloo",
            "kl",
            {"coef": 0.001, "estimator": "k1", "before_baseline": True},
        ),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive",
            "kl",
            {"coef": 0.001, "estimator": "k1", "target": 0.1},
        ),
        (
            f"{A}.actor.use_kl_loss=True {A}.actor.kl_loss_coef=0.0 algorithm.use_kl_in_reward=True "
            "algorithm.kl_ctrl.kl_coef=0.01",
            "kl",
            {"coef": 0.01, "estimator": "k1"},
        ),
        (f"{A}.actor.clip_ratio_high=0.28", "loss", {"dual_clip": 3.0, "clip_high": 0.28}),
        ("trainer.critic_warmup=5", "critic_warmup", 4),
        (
            f"{A}.actor.policy_loss.loss_mode=cispo {A}.actor.clip_ratio_low=10 {A}.actor.clip_ratio_high=0.2",
            "loss",
            {"use": "cispo", "clip_high": 0.2},  # ratios have no lower bound
        ),
        (
            f"{A}.actor.policy_loss.loss_mode=sapo {A}.actor.tau_pos=2 {A}.actor.loss_agg_mode=token-mean",
            "loss",
            {"use": "sapo", "tau_positive": 2.0},  # verl takes seq-mean-token-mean
        ),
        (f"{A}.actor.policy_loss.loss_mode=geo_mean", "loss", {"use": "gmpo", "clip_low": 0.2, "clip_high": 0.2}),
        (
            f"{A}.actor.policy_loss.loss_mode=clip_cov {A}.actor.policy_loss.clip_cov_ub=7 "
            f"{A}.actor.clip_ratio_low=1.0 {A}.actor.clip_ratio_high=1.0",
            "loss",
            {"use": "covariance", "high": 7.0, "clip_low": 1.0, "clip_high": 1.0},
        ),
        (
            f"{A}.actor.policy_loss.loss_mode=kl_cov {A}.actor.policy_loss.kl_cov_ratio=0.02 "
            f"{A}.actor.loss_agg_mode=seq-mean-token-mean critic.loss_agg_mode=token-mean",
            "loss",
            {
                "use": "covariance",
                "treatment": "kl",
                "share": 0.02,
                "kl_coef": 0.1,
                "aggregation": "seq_mean_token_mean",
            },
        ),
        (
            f"algorithm.adv_estimator=grpo {A}.actor.loss_agg_mode=seq-mean-token-sum-norm "
            "data.max_response_length=100",
            "loss",
            {"dual_clip": 3.0, "aggregation": "seq_sum_constant", "max_length": 100},
        ),
        (
            "reward.reward_manager.name=dapo +reward.reward_kwargs.overlong_buffer_cfg.enable=True "
            "+reward.reward_kwargs.overlong_buffer_cfg.len=64 +reward_model.reward_kwargs.max_resp_len=512",
            "shaping",
            {"overlong_buffer": 64, "overlong_max": 512},
        ),
        (
            "algorithm.rollout_correction.rollout_is=token",
            "loss",
            {"dual_clip": 3.0, "correction": {"level": "token", "mode": "truncate", "low": 0.0, "high": 2.0}},
        ),
    ],
)
def test_algorithms_losses_and_kl(overrides, part, expected):
    assert values(f"{A}.rollout.n=4 {overrides}")["algorithm"][part] == expected


@pytest.mark.parametrize("start", ["recipe.dapo.main_dapo", "verl.trainer.main_ppo --config-name=dapo_trainer"])
def test_defaults_of_main_dapo(start):
    buffer = "reward_model.overlong_buffer"
    command = f"python3 -m {start} {A}.model.path=M data.train_files=d.parquet {buffer}.enable=True {buffer}.len=64"
    run = tomllib.loads(migrate("verl", f"{command} {buffer}.penalty_factor=0.5", {}, PLUGINS))
    shaping = {"overlong_buffer": 64, "overlong_factor": 0.5, "overlong_max": 512}
    assert run["algorithm"]["shaping"] == shaping, "its reward manager is dapo"
    assert run["observer"][0]["project"] == "verl-dapo"
    run = tomllib.loads(migrate("verl", command, {}, PLUGINS))
    assert run["algorithm"]["shaping"]["overlong_factor"] == 0, "no punishment unless a factor is set"


def test_clip_ratio_alone_has_no_effect_as_in_verl():
    """verl's bounds are those of clip_ratio_low and clip_ratio_high, which are 0.2 in its configuration."""
    command = f"python3 -m verl.trainer.main_ppo {A}.model.path=M data.train_files=d.parquet {A}.actor.clip_ratio=0.1"
    text = migrate("verl", command, {}, PLUGINS)
    assert "clip_low" not in tomllib.loads(text)["algorithm"]["loss"], "0.2 is the default"
    assert "# To do: verl since 0.3 does not read actor_rollout_ref.actor.clip_ratio where" in text
    loss = tomllib.loads(migrate("verl", f"{command} {A}.actor.clip_ratio_low=null", {}, PLUGINS))["algorithm"]["loss"]
    assert (loss["clip_low"], "clip_high" in loss) == (0.1, False)


@pytest.mark.parametrize(("part", "section"), [(f"{A}.actor", "trainer"), ("critic", "critic.trainer")])
def test_gradients_are_clipped_at_the_bound_of_the_optimizer(part, section):
    def bound(overrides):
        command = f"python3 -m verl.trainer.main_ppo {A}.model.path=M data.train_files=d.parquet {overrides}"
        text = migrate("verl", command, {}, PLUGINS)
        run = tomllib.loads(text)
        for name in section.split("."):
            run = run[name]
        return run.get("max_grad_norm", 1.0), f"verl reads {part}.grad_clip until 0.7 only" in text

    assert bound("") == (1.0, False)
    assert bound(f"{part}.optim.clip_grad=0.3") == (0.3, False)
    assert bound(f"{part}.grad_clip=0.5") == (0.5, True)
    assert bound(f"{part}.grad_clip=0.5 {part}.optim.clip_grad=0.3") == (0.3, False)


def test_engines_of_sglang_become_those_of_vllm_with_a_note():
    command = f"python3 -m verl.trainer.main_ppo {A}.model.path=M data.train_files=d.parquet {A}.rollout.name=sglang"
    text = migrate("verl", command, {}, PLUGINS)
    note = "the generator sglang_server uses servers that are already running"
    assert note in " ".join(text.replace("#", " ").split())
    assert tomllib.loads(text)["generator"]["use"] == "vllm"


def test_warm_up_is_counted_in_steps_of_the_run():
    optim = f"{A}.actor.optim"
    run = values(
        f"algorithm.adv_estimator=grpo {A}.rollout.n=4 {optim}.lr_warmup_steps=10 {optim}.lr_scheduler_type=cosine"
    )
    assert run["trainer"]["warmup_steps"] == 10 * 1024 // 256
    assert run["trainer"]["schedule"] == "cosine_with_min"
    assert run["trainer"]["min_lr_ratio"] == 0.0


def test_the_critic_has_options_of_its_own():
    actor = f"{A}.actor.optim.lr_scheduler_type=cosine {A}.actor.optim.betas=[0.9,0.95]"
    run = values(f"{actor} {A}.actor.fsdp_config.model_dtype=bf16 critic.model.fsdp_config.fsdp_size=8")
    assert run["policy"]["trainer"] == {"schedule": "cosine_with_min", "min_lr_ratio": 0.0}
    assert run["critic"]["trainer"] == {"lr": 1e-5, "betas": [0.9, 0.999]}
    assert (run["policy"]["storage"], run["critic"]["storage"]) == ("bf16", "fp32")


def test_adapters_of_the_policy_are_not_those_of_the_critic():
    run = values(f"{A}.model.lora_rank=32")
    assert run["policy"]["trainer"]["lora"] == {"rank": 32, "alpha": 16}
    assert "lora" not in run["trainer"], "it would apply to the critic too"
    assert "lora" not in run["critic"]["trainer"]
    run = values("critic.model.lora_rank=8 critic.model.target_modules=[q_proj]")
    assert run["critic"]["trainer"]["lora"] == {"rank": 8, "alpha": 16, "targets": ["q_proj"]}
    run = values(f"algorithm.adv_estimator=grpo {A}.rollout.n=4 {A}.model.lora_rank=32")
    assert run["trainer"]["lora"] == {"rank": 32, "alpha": 16}


def test_kernels_that_the_trainer_does_not_support_are_no_error():
    assert "kernels" not in values(f"{A}.model.use_liger=True")["trainer"]


def test_a_missing_model_is_left_to_do():
    text = migrate("verl", "python3 -m verl.trainer.main_ppo data.train_files=d.parquet", {}, PLUGINS)
    assert "# To do: name the model: policy.model." in text
    assert "model" not in tomllib.loads(text)["critic"]


def test_scripts_and_lists_are_read(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    run = tomllib.loads(migrate("verl", str(script), {"DATA": "/data"}, PLUGINS))
    sources = [(source["path"], source["name"]) for source in run["data"]["train"]]
    assert sources == [("/data/gsm8k/train.parquet", "gsm8k_train"), ("/data/math/train.parquet", "math_train")]
    with pytest.raises(ConfigError, match=r"run\.sh, line 7: .*--set DATA=VALUE"):
        migrate("verl", str(script), {}, PLUGINS)


def test_configurations_and_entry_points_of_forks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("defaults: [ppo_trainer]\ndata: {max_response_length: 64, train_batch_size: 1024}\n")
    run = values("--config-path . --config-name=own data.train_batch_size=512")
    assert (run["sampling"]["max_new_tokens"], run["data"]["batch_size"]) == (64, 512)
    assert values("--config-name ppo_trainer")
    text = migrate("verl", f"python -m verl.trainer.main_ppo_own {A}.model.path=M", {}, PLUGINS)
    assert "main_ppo_own is not verl's own entry point" in text
    command = f"python -m verl.trainer.main_ppo {A}.model.path=M {A}.rollout.own_key=1 {A}.rollout.wandb_key=k1"
    text = migrate("verl", command, {}, PLUGINS, allow_unknown=True)
    assert "own_key=1" in text
    assert "k1" not in text, "values of keys are never written"


def test_rewards():
    [reward] = values("custom_reward_function.path=r.py custom_reward_function.name=score")["reward"]
    assert reward["use"] == "file:r.py:score"
    for names in ("reward_model.enable=True reward_model.model.path=R", "reward.reward_model.enable=True"):
        [reward] = values(f"{names} reward.reward_model.model_path=R")["reward"]
        assert reward["use"] == "model:R"
    rewards = "reward_model.enable=True reward_model.model.path=R custom_reward_function.path=r.py"
    with pytest.raises(ConfigError, match=r"custom_reward_function\.path is also set"):
        values(rewards)
    command = f"python3 -m verl.trainer.main_ppo {A}.model.path=M data.train_files=d.parquet {rewards}"
    [reward] = tomllib.loads(migrate("verl", command, {"custom_reward_function.path": "null"}, PLUGINS))["reward"]
    assert reward["use"] == "model:R"
    assert values("reward.custom_reward_function.path=r.py")["reward"] == [{"use": "file:r.py:compute_score"}]


def test_keys_of_the_newest_version_and_of_groups():
    run = values(
        "+data.apply_chat_template_kwargs.enable_thinking=False algorithm.filter_groups.enable=True "
        "ray_kwargs.ray_init.runtime_env.py_executable=null +actor_rollout_ref.rollout.engine_kwargs.vllm.x=1 "
        "algorithm.adv_estimator=rloo_vectorized actor_rollout_ref.rollout.n=2"
    )
    assert run["data"]["template_kwargs"] == {"enable_thinking": False}
    assert run["stream"]["filter"] == {"min_std": 0.0}
    assert "kl" not in values("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.0")["algorithm"]
    assert run["algorithm"]["use"] == "rloo"


@pytest.mark.parametrize(
    ("overrides", "telling"),
    [
        ("data.train_batchsize=1", "data.train_batch_size"),
        ("data.a=1 data.b=1", r"(?s)data\.a is unknown.*data\.b is unknown.*--allow-unknown"),
        ("--config-name=absent", "absent.yaml cannot be read"),
        (f"{A}.actor.loss_mode=gpg", "loss_mode=gpg"),
        ("algorithm.adv_estimator=gpg", "gpg"),
        (f"{A}.actor.strategy=megatron", "megatron"),
        (f"{A}.actor.use_kl_loss=True {A}.actor.kl_loss_type=kl", "kl_loss_type"),
        (f"{A}.actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "use_kl_in_reward"),
        ("--config-name=ppo_megatron_trainer", "config-name"),
        (f"{A}.rollout.n=many", "takes integer"),
        ("algorithm.rollout_correction.rollout_rs=token", "rollout_rs"),
        ("critic.ppo_epochs=2", "ppo_epochs"),
        ("critic.loss_agg_mode=seq-mean-token-sum", "the critic's loss is a mean over tokens"),
        (f"algorithm.adv_estimator=gae {A}.actor.loss_agg_mode=seq-mean-token-sum", "critic takes the same mode"),
        (f"{A}.actor.optim.num_cycles=1", "the schedule cosine has half a cycle"),
        (f"+{A}.ref.model.path=R", "verl reads it until 0.7 only"),
        ("distillation.enabled=True", "distill"),
        (f"{A}.rollout.multi_turn.enable=True", "multi_turn"),
        ("reward.reward_manager.name=prime", "allowed: naive, dapo"),
        (f"{A}.rollout.tensor_model_parallel_size=3", "tensor_model_parallel_size"),
        (f"{A}.rollout.tensor_model_parallel_size=0", "it must be at least 1"),
        ("data.train_max_samples=null", "null cannot be converted for all of these options: data.train_max_samples"),
    ],
)
def test_what_means_nothing_here_is_refused(overrides, telling):
    with pytest.raises(ConfigError, match=telling):
        values(overrides)


def test_a_migrated_run_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    tiny_model("model", hidden=128, heads=4, kv_heads=2, chat_template=CHAT_TEMPLATE)
    row = {"prompt": [{"role": "user", "content": "1+1="}], "reward_model": {"ground_truth": "2"}, "data_source": "x"}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 1100)
    Path("r.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    )
    words = f"algorithm.adv_estimator=grpo data.train_files=rows.jsonl {A}.model.path=model {A}.rollout.n=4"
    text = migrate("verl", f"python -m verl.trainer.main_ppo {words} custom_reward_function.path=r.py", {}, PLUGINS)
    Path("run.toml").write_text("\n".join(line for line in text.splitlines() if "memory_share" not in line))
    assert main(["train", "run.toml", "--dry-run"]) == 0, capsys.readouterr().err
