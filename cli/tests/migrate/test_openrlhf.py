"""Commands of OpenRLHF become run files that do the same."""

import json
import shlex
import tomllib
from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_cli.migrate.find import migrate
from rlhf_runtime.config.load import load
from rlhf_testing.tiny import CHAT_TEMPLATE, tiny_model, tiny_reward_model

PLUGINS = Plugins.discover()
RL = "--actor.model_name_or_path M --reward.model_name_or_path R --vllm.num_engines 1"
LOCAL = {
    "prompt_dataset": "rows.jsonl", "dataset": "rows.jsonl", "model_name_or_path": "model", "remote_url": "reward.py",
    "agent_func_path": "agent.py",
}  # fmt: skip
REWARD = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(queries)\n"
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}
    async def step(self, states, **kwargs):
        return {"rewards": 1.0, "environment_feedback": "", "done": True}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


TEXTS = Path(__file__).with_name("openrlhf_scripts.txt").read_text().splitlines()
SCRIPTS = dict(text.split(": ", 1) for text in TEXTS if not text.startswith("#"))


def values(flags, entry="train_ppo_ray"):
    """The run file that a command becomes."""
    return tomllib.loads(migrate("openrlhf", f"python3 -m openrlhf.cli.{entry} {flags}", {}, PLUGINS))


def rl(flags=""):
    return values(f"{RL} {flags}")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, rows, a reward and an agent."""
    folder = tmp_path_factory.mktemp("place")
    tiny_model(folder / "model", hidden=128, heads=4, kv_heads=2, chat_template=CHAT_TEMPLATE)
    config = tiny_reward_model(folder / "rm", hidden=16, heads=2, kv_heads=1) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mean": 0.0, "std": 1.0}))
    row = {"context_messages": [{"role": "user", "content": "1+1="}], "prompt": "1+1=", "label": "2", "question": "1"}
    row |= {"response": "2", "chosen": "1", "rejected": "2"}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 1100)
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_example_scripts_become_run_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = f"ray job submit -- python3 -m openrlhf.cli.{SCRIPTS[name]}"
    text = migrate("openrlhf", command, {}, PLUGINS)
    Path("run.toml").write_text(text)
    load("run.toml")
    for word in shlex.split(SCRIPTS[name])[1:]:
        assert not word.startswith("--") or word in text, f"{word} is not in the file"


@pytest.mark.parametrize(
    "name",
    [
        "train_sft",
        "train_dpo_llama",
        "train_rm",
        "train_ppo_ray_hybrid_engine",
        "train_prorlv2_math_hybrid_engine",
        "train_reinforce_baseline_ray_agent_async",
    ],
)
def test_migrated_runs_start(name, place, tmp_path, monkeypatch, capsys):
    """With a model, rows and rewards that are here. The share of a GPU's memory is left out, because none is here."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("WANDB_MODE", "offline")
    words = shlex.split(SCRIPTS[name])
    for number, word in enumerate(words):
        if (local := LOCAL.get(word.rpartition(".")[2])) is not None:
            words[number + 1] = "rm" if word == "--reward.model_name_or_path" else local
        elif word == "--eval.dataset":
            words[number + 1] = "rows.jsonl"
    text = migrate("openrlhf", f"deepspeed --module openrlhf.cli.{shlex.join(words)}", {}, PLUGINS)
    file = tmp_path / "run.toml"
    file.write_text("\n".join(line for line in text.splitlines() if "memory_share" not in line))
    code = main(["train", str(file), "--dry-run", "--output", str(tmp_path / "run")])
    assert code == 0, capsys.readouterr().err


# --------------------------------------------------------------------------------------------- values


def test_batches_are_counted_as_in_openrlhf():
    flags = "--rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 128 --train.max_epochs 2"
    run = rl(f"{flags} --train.num_episodes 3")
    assert run["data"]["batch_size"] == 64, "prompts a step"
    assert run["sampling"]["samples_per_prompt"] == 8
    assert run["algorithm"]["minibatches"] == 64 * 8 // 128
    assert run["algorithm"]["epochs"] == 2
    assert run["run"]["epochs"] == 3
    with pytest.raises(ConfigError, match=r"train\.batch_size.*100.*512"):
        rl(flags.replace("128", "100"))
    run = values(
        "--model.model_name_or_path M --data.dataset d.jsonl --data.output_key o --train.batch_size 64", "train_sft"
    )
    assert run["data"]["batch_size"] == 64, "rows a step"
    assert run["run"]["epochs"] == 2, "OpenRLHF's default of train_sft"


def test_defaults_that_differ_are_written():
    run = rl()
    assert run["algorithm"]["kl"]["coef"] == 0.01
    assert run["algorithm"]["reward_clip"] == [-10, 10]
    assert run["critic"] == {"model": "R", "dtype": "bf16", "storage": "bf16", "trainer": {"lr": 9e-6}}
    assert run["trainer"]["schedule"] == "cosine_with_min"
    assert run["trainer"]["warmup_ratio"] == 0.03
    assert run["generator"]["prefix_caching"] is False
    assert run["run"]["seed"] == 42
    assert run["placement"]["policy"]["ranks"] == 8


@pytest.mark.parametrize("spelling", ["old", "dotted"])
def test_old_and_dotted_names_mean_the_same(spelling):
    old = "--pretrain M --reward_pretrain R --vllm_num_engines 1 --actor_learning_rate 1e-5 --init_kl_coef 0 --l2 0.1"
    dotted = (
        f"{RL} --actor.adam.lr=1e-5 --algo.kl.init_coef 0 --actor.adam.weight_decay 0.1 --critic.adam.weight_decay 0.1"
    )
    run = values(old if spelling == "old" else dotted)
    assert run["trainer"]["lr"] == 1e-5
    assert run["trainer"]["weight_decay"] == 0.1
    assert run["critic"]["trainer"] == {"lr": 9e-6}, "the same weight decay"
    assert "kl" not in run["algorithm"]


GROUP = "--rollout.n_samples_per_prompt 8 --algo.advantage.estimator"
CORRECTION = "--algo.advantage.is_correction"


@pytest.mark.parametrize(
    ("flags", "part", "expected"),
    [
        (f"{GROUP} group_norm", "use", "grpo"),
        (f"{GROUP} dr_grpo", "advantage", {"std": "none"}),
        ("--algo.advantage.estimator reinforce --no_advantage_std_norm", "advantage", {"normalise": "center"}),
        ("--actor.policy_loss_type gspo", "loss", {"use": "gspo", "clip_low": 0.2, "clip_high": 0.2}),
        ("--actor.eps_clip_low_high 0.1 0.3", "loss", {"clip_low": 0.1, "clip_high": 0.3}),
        ("--algo.kl.use_loss --algo.kl.estimator k3", "kl", {"coef": 0.01, "where": "loss"}),
        ("--algo.kl.use_loss --algo.kl.estimator k2", "kl", {"coef": 0.01, "where": "loss", "estimator": "k2"}),
        ("--algo.kl.estimator k2", "kl", {"coef": 0.01, "estimator": "k2"}),
        ("--critic.freezing_steps 4", "critic_warmup", 5),
        (f"{CORRECTION}_enable {CORRECTION}_type seq-mask-tis", "loss", {"correction": {"preset": "seq_mask_tis"}}),
        ("--enable_vllm_is_correction --use_icepop", "loss", {"correction": {"preset": "icepop"}}),
        (f"{CORRECTION}_level seq", "loss", {"correction": {"preset": "seq_mask_tis"}}),
        (
            f"{CORRECTION}_level token {CORRECTION}_mode clip {CORRECTION}_threshold 2",
            "loss",
            {"correction": {"preset": "tis", "low": 0.0, "high": 2.0}},
        ),
        (
            f"{CORRECTION}_level seq {CORRECTION}_gating binary_kl {CORRECTION}_threshold 0.005",
            "loss",
            {
                "correction": {"level": "sequence_mean", "mode": "mask", "statistic": "binary_kl", "high": 0.005},
            },
        ),
        (
            "--reward.overlong_buffer_len 64 --rollout.max_new_tokens 512",
            "shaping",
            {"overlong_buffer": 64, "overlong_max": 512},
        ),
        ("--actor.loss_agg_mode seq-mean-token-mean", "loss", {"aggregation": "seq_mean_token_mean"}),
    ],
)
def test_algorithms_losses_and_kl(flags, part, expected):
    assert rl(flags)["algorithm"][part] == expected


def test_margins_are_read_by_the_losses_that_read_them_in_openrlhf():
    flags = "--model.model_name_or_path M --data.dataset d.jsonl --model.margin_loss_enable"
    assert values(flags, "train_rm")["data"]["margin"] == "margin"
    run = values(f"{flags} --model.loss_type logexp", "train_rm")
    assert run["algorithm"]["loss"]["loss_type"] == "logexp"
    assert "margin" not in run["data"], "LogExpLoss takes the margin and does not use it"


def test_schedules_warm_up_and_clipping():
    trainer = rl("--actor.lr_scheduler constant --actor.max_norm 0")["trainer"]
    assert "schedule" not in trainer, "constant is the default"
    assert "warmup_ratio" not in trainer, "constant has no warm-up in OpenRLHF"
    assert trainer["max_grad_norm"] == 1e9, "0 turns clipping off there"
    assert rl("--actor.lr_scheduler inverse_sqrt")["trainer"]["schedule"] == "inverse_sqrt"
    trainer = rl("--actor.lr_scheduler constant_with_warmup --actor.lr_warmup_ratio 0.1")["trainer"]
    assert trainer["warmup_ratio"] == 0.1


def test_stages_that_add_up_in_bf16_become_2_and_old_scripts_are_read():
    assert rl("--zero_stage 1")["trainer"].get("stage", 2) == 2
    assert rl("--zero_stage 3")["trainer"]["stage"] == 3
    command = "deepspeed ../train_sft.py --pretrain M --dataset d --output_key o"
    assert tomllib.loads(migrate("openrlhf", command, {}, PLUGINS))["policy"]["model"] == "M"


def test_lengths():
    run = rl("--prompt_max_len 100 --generate_max_len 50")
    assert (run["data"]["max_tokens"], run["data"]["max_prompt_tokens"], run["sampling"]["max_new_tokens"]) == (
        150,
        100,
        50,
    )
    assert rl("--data.max_len 512")["sampling"]["max_new_tokens"] == 511, "what the prompt leaves"


def test_the_continuous_stream_and_placement():
    run = rl(f"--train.async_enable --train.async_queue_size 2 --train.colocate_all {GROUP} rloo")
    assert run["stream"] == {"mode": "continuous", "staleness": 2}
    assert run["sync"] == {"in_flight": "drain"}
    assert "generator" not in run["placement"], "engines have devices of their own, 1 x 1"
    assert run["placement"]["reference"]["share"] == "policy"
    run = rl("--train.colocate_all --vllm.num_engines 4 --vllm.tensor_parallel_size 2")
    assert run["placement"]["generator"] == {"ranks": 4, "devices": 2, "share": "policy"}
    assert run["generator"]["tensor_parallel"] == 2


def test_rewards_and_agents(tmp_path):
    scored = RL.replace(
        "--reward.model_name_or_path R", "--reward.remote_url http://a/get,http://b/get --data.label_key answer"
    )
    [reward] = values(scored)["reward"]
    assert reward["urls"] == ["http://a/get", "http://b/get"]
    assert reward["label"] == "answer"
    assert reward["special_tokens"] is True
    file = tmp_path / "own.py"
    file.write_text("class AgentExecutor:\n    async def execute(self):\n        pass\n")
    assert rl(f"--agent_func_path {file}")["rollout"]["use"] == f"file:{file}", "it has an execute() of its own"
    run = rl("--agent_func_path elsewhere.py")
    assert run["env"]["use"] == "file:elsewhere.py"
    assert run["rollout"]["use"] == "multi_turn"


def test_the_limit_of_rows_applies_to_the_evaluation_too():
    run = rl("--data.prompt_dataset d.jsonl --data.max_samples 20 --eval.dataset e.jsonl --eval.steps 1")
    assert (run["data"]["train"][0]["max_rows"], run["eval"]["max_rows"]) == (20, 20)
    assert "max_rows" not in rl("--eval.dataset e.jsonl --eval.steps 2")["eval"]


def test_rows_of_supervised_runs():
    model = "--model.model_name_or_path M --data.dataset a.jsonl,b.jsonl --data.dataset_probs 0.3,0.7"
    data = values(f"{model} --data.input_key q --data.output_key a", "train_sft")["data"]
    assert data["input_template"] == "User: {q}\nAssistant: ", "OpenRLHF's default without a chat template"
    assert [(s["path"], s["probability"], s["max_rows"]) for s in data["train"]] == [
        ("a.jsonl", 0.3, 1_000_000),
        ("b.jsonl", 0.7, 1_000_000),
    ]
    data = values(f"{model} --apply_chat_template --multiturn --input_key m", "train_sft")["data"]
    assert (data["messages"], data["loss_on"]) == ("m", "assistant")
    run = values(f"{model} --ipo --beta 0.2 --eval_dataset e.jsonl", "train_dpo")
    assert run["algorithm"]["loss"] == {"beta": 0.2, "loss_type": "ipo", "ipo": "sum"}
    assert run["data"]["eval"] == [{"path": "e.jsonl", "split": "test"}]
    assert run["data"]["max_tokens"] == 512
    assert run["trainer"]["lr"] == 1e-5
    assert "placement" not in run
    ranks = values(f"{model} --ring_attn_size 2", "train_dpo")["placement"]
    assert ranks == {"policy": {"ranks": 2}, "reference": {"ranks": 2, "share": "policy"}}
    assert values(f"{model} --output_key o", "train_kto")["algorithm"]["loss"]["beta"] == 0.01


# --------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("flags", "telling"),
    [
        ("--actor.optim muon", r"actor\.optim muon: the rate of Muon means something else"),
        ("--critic.optim muon --critic.muon.lr 0.01", r"critic\.optim muon"),
        ("--pretrain_data d", "pretrain_data d: an additional loss on pretraining data is not supported"),
        ("--actor.lr_scheduler inverse_sqrt --actor.lr_warmup_ratio 0", r"actor\.lr_scheduler.*without a warm-up"),
        ("--actor.adam.learning_rate 1", r"line 1: .*actor\.adam\.learning_rate is unknown"),
        ("--acter.adam.lr 1", r"actor\.adam\.lr"),
        ("--model.beta 0.1", r"model\.beta is an option of other entry points"),
        ("--rollout.batch_size many", r"rollout\.batch_size takes integer, got many"),
        ("--algo.advantage.estimator flash_reinforce --algo.advantage.gamma 0.9", "algo.advantage.gamma"),
        ("--algo.kl.use_loss", "k1 as a loss"),
        ("--ds.param_dtype fp16", "fp16"),
        ("--data.prompt_dataset a@b", "a@b"),
        ("--actor.lr_scheduler polynomial", "polynomial"),
        ("--actor.eps_clip_low_high 0.1", "two numbers, LOW and HIGH"),
        ("--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.1", "two numbers, LOW and HIGH"),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 1 2 3",
            "is_correction_threshold 1 2 3: it takes HIGH, or LOW and HIGH",
        ),
        ("--algo.advantage.is_correction_level token --algo.advantage.is_correction_gating tv", "gating tv"),
        ("--data.max_samples $N", r"\$N.*--set N=VALUE"),
        ("stray", "stray"),
        ("--data.prompt_dataset a --data.prompt_probs some", "expected one number for each data set"),
    ],
)
def test_what_means_nothing_here_is_refused(flags, telling):
    with pytest.raises(ConfigError, match=telling):
        rl(flags)


def test_scripts_without_a_training_with_several_and_of_other_entry_points_are_refused(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("echo hello\n")
    with pytest.raises(ConfigError, match=r"run\.sh: no command starts a training"):
        migrate("openrlhf", str(script), {}, PLUGINS)
    script.write_text("deepspeed --module openrlhf.cli.train_sft\n\ndeepspeed --module openrlhf.cli.train_dpo\n")
    with pytest.raises(ConfigError, match="train_sft in line 1, train_dpo in line 3"):
        migrate("openrlhf", str(script), {}, PLUGINS)
    with pytest.raises(ConfigError, match="serve-reward"):
        migrate("openrlhf", "python -m openrlhf.cli.serve_rm --port 1", {}, PLUGINS)
    with pytest.raises(ConfigError, match="cannot be read"):
        migrate("openrlhf", "absent.sh", {}, PLUGINS)


def test_keys_are_not_written(capsys):
    assert main(["migrate", "openrlhf", f"python -m openrlhf.cli.train_ppo_ray {RL} --logger.wandb.key secret123"]) == 0
    text = capsys.readouterr().out
    assert "secret123" not in text
    assert tomllib.loads(text)["observer"][0]["use"] == "wandb"


def test_a_file_is_written_and_not_replaced(tmp_path, capsys):
    words = ["migrate", "openrlhf", f"python -m openrlhf.cli.train_ppo_ray {RL}", "-o", str(tmp_path / "run.toml")]
    assert main(words) == 0
    assert main(words) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path), "--force"]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_offloaded_roles():
    run = rl("--ref_reward_offload")
    assert run["reference"]["trainer"] == {"offload_params": "cpu", "offload_optimizer": "cpu", "stage": 3}
    assert run["roles"]["reward_model"]["trainer"] == run["reference"]["trainer"]
