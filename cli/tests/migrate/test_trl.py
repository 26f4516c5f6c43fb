"""Commands, configurations and scripts of TRL become run files that do the same."""

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
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
import torch
RATE = 2e-6
args = GRPOConfig(output_dir="out", learning_rate=RATE, per_device_train_batch_size=4, num_generations=4)
raise SystemExit("never executed")
GRPOTrainer(model="some/model", args=args, reward_funcs=[torch.nn])
"""


OTHER_MEANS = (
    *(f"--loss_type {name}" for name in ("grpo", "dr_grpo", "sapo")),
    "--loss_type luspo --importance_sampling_level sequence",
    "--top_entropy_quantile 0.2",
)
"""Losses that are no mean over all tokens, which TRL's entropy bonus is in any case."""


def values(source, **variables):
    return tomllib.loads(migrate("trl", source, variables, PLUGINS))


def grpo(flags="", launcher="trl"):
    return values(f"{launcher} grpo --model_name_or_path M --dataset_name d.jsonl {flags}")


@pytest.mark.parametrize(
    ("flags", "prompts", "minibatches"),
    [
        ("", 1, 1),  # 8 samples of 8 a prompt
        ("--per_device_train_batch_size 16 --gradient_accumulation_steps 2", 4, 1),
        ("--per_device_train_batch_size 16 --gradient_accumulation_steps 2 --steps_per_generation 8", 16, 4),
        ("--per_device_train_batch_size 16 --generation_batch_size 64", 8, 4),
        ("--gradient_accumulation_steps 4 --steps_per_generation 1", 4, 1),  # with the same weights
        ("--num_generations 2", 4, 1),
    ],
)
def test_batches_are_counted_in_prompts(flags, prompts, minibatches):
    run = grpo(flags)
    assert run["data"].get("batch_size", 16) == prompts
    assert run["algorithm"].get("minibatches", 1) == minibatches


def test_processes_multiply_batches():
    assert grpo(launcher="accelerate launch --num_processes 4 trl")["data"]["batch_size"] == 4
    launcher = "torchrun --nproc_per_node=2 --nnodes 2 trl/scripts/sft.py"
    run = values(f"{launcher} --model_name_or_path M --dataset_name d.jsonl --gradient_accumulation_steps 2")
    assert run["data"]["batch_size"] == 8 * 2 * 4
    assert run["placement"]["policy"]["ranks"] == 4


def test_processes_of_configurations_of_accelerate(tmp_path):
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    (tmp_path / "grpo.yaml").write_text("num_processes: 2\nenv:\n  A: 1\nlearning_rate: 1e-5\n")
    assert grpo(launcher=f"accelerate launch --config_file {tmp_path}/zero3.yaml trl")["data"]["batch_size"] == 4
    assert grpo("--num_processes 4")["data"]["batch_size"] == 4
    assert grpo("--accelerate_config zero2")["data"]["batch_size"] == 8
    assert grpo(f"--config {tmp_path}/grpo.yaml")["data"]["batch_size"] == 2
    with pytest.raises(ConfigError, match=r"absent\.yaml cannot be read.*--set processes=N"):
        grpo(launcher="accelerate launch --config_file absent.yaml trl")
    with pytest.raises(ConfigError, match="takes a number, got 'many'"):
        values("trl grpo --model_name_or_path M", processes="many")


def test_steps_are_counted_in_optimizer_steps():
    run = grpo("--num_iterations 2 --max_steps 100 --save_steps 25 --eval_strategy steps --eval_steps 10")
    assert run["run"]["steps"] == 50
    assert run["checkpoint"]["every"] == 13
    assert run["eval"]["every"] == 5
    with pytest.raises(ConfigError, match="max_steps"):
        grpo("--num_iterations 2 --max_steps 101")


def test_defaults_that_differ_are_written():
    run = grpo()
    assert run["trainer"] == {"schedule": "linear", "betas": [0.9, 0.999]}
    assert run["run"]["epochs"] == 3
    assert run["policy"]["gradient_checkpointing"] is True
    assert run["checkpoint"]["every"] == 500
    assert run["sampling"] == {"samples_per_prompt": 8, "max_new_tokens": 512}
    sft = values("trl sft --model_name_or_path M --dataset_name d.jsonl")
    assert sft["trainer"]["lr"] == 2e-5
    assert sft["data"]["max_tokens"] == 1024
    assert values("trl kto --model_name_or_path M --dataset_name d.jsonl")["data"]["shuffle"] is False


@pytest.mark.parametrize(
    ("flags", "part", "expected"),
    [
        ("--loss_type grpo", "loss", {"aggregation": "seq_mean_token_mean"}),
        ("--loss_type dr_grpo --scale_rewards none", "loss", {"aggregation": "seq_sum_constant", "max_length": 512}),
        ("--scale_rewards false", "advantage", {"std": "none"}),
        ("--loss_type cispo --epsilon_high 5", "loss", {"use": "cispo"}),
        (
            "--loss_type grpo --importance_sampling_level sequence --epsilon 3e-4 --epsilon_high 4e-4",
            "loss",
            {"use": "gspo"},
        ),
        ("--epsilon_high 0.28 --delta 4", "loss", {"clip_high": 0.28, "dual_clip": 4.0}),
        ("--beta 0.04", "kl", {"coef": 0.04, "where": "loss", "unbiased": True}),
        (
            "--beta 0.04 --use_bias_correction_kl false --sync_ref_model --ref_model_sync_steps 10",
            "kl",
            {"coef": 0.04, "where": "loss", "snapshot_every": 10, "snapshot_share": 0.6},
        ),
        (
            "--use_vllm",
            "loss",
            {"correction": {"level": "sequence_product", "mode": "mask", "low": 0.0, "high": 3.0}},
        ),
        (
            "--use_vllm --vllm_importance_sampling_mode token_truncate --vllm_importance_sampling_clip_max 2",
            "loss",
            {"correction": {"level": "token", "mode": "truncate", "low": 0.0, "high": 2.0}},
        ),
    ],
)
def test_losses_advantages_and_kl(flags, part, expected):
    assert grpo(flags)["algorithm"][part] == expected


def test_rloo_has_its_kl_in_the_reward_before_the_baseline():
    run = values("trl rloo --model_name_or_path M --dataset_name d.jsonl")["algorithm"]
    assert run["kl"] == {"coef": 0.05, "before_baseline": True}
    assert run["loss"] == {"aggregation": "seq_mean_token_sum"}
    with pytest.raises(ConfigError, match="num_iterations"):
        values("trl rloo --num_iterations 2")


def test_schedules_and_adapters():
    run = grpo(
        "--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs '{\"min_lr_rate\": 0.2}' --warmup_steps 0.1"
    )
    assert run["trainer"]["schedule"] == "cosine_with_min"
    assert run["trainer"]["min_lr_ratio"] == 0.2
    assert run["trainer"]["warmup_ratio"] == 0.1
    assert grpo("--warmup_steps 20")["trainer"]["warmup_steps"] == 20
    assert grpo("--warmup_steps 20 --lr_scheduler_type inverse_sqrt")["trainer"]["schedule"] == "inverse_sqrt"
    assert grpo("--train_sampling_strategy sequential")["data"]["shuffle"] is False
    assert grpo("--use_liger_kernel")["trainer"]["kernels"] == "liger"
    assert "kernels" not in grpo("--use_liger_kernel --dtype bfloat16")["trainer"], "liger takes norms in fp32 only"
    sharded = values("accelerate launch --num_processes 2 trl/scripts/sft.py --use_liger_kernel")
    assert (sharded["trainer"]["use"], "kernels" in sharded["trainer"]) == ("fsdp", False), "it needs whole layers"
    lora = grpo("--use_peft --lora_r 8")["trainer"]["lora"]
    assert lora == {"rank": 8, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}


def test_quantised_models_on_several_gpus_have_a_trainer_that_does_not_divide_them():
    run = values("accelerate launch --num_processes 2 trl/scripts/sft.py --use_peft --load_in_4bit")
    assert (run["trainer"]["use"], run["trainer"]["lora"]["quantization"]) == ("deepspeed", "nf4")
    run = values("accelerate launch --num_processes 2 trl/scripts/sft.py --load_in_4bit")
    assert run["trainer"]["use"] == "fsdp", "nothing is quantised without adapters"


def test_masked_answers_that_trl_still_counts_are_a_note():
    command, note = "trl grpo --model_name_or_path M --dataset_name d --mask_truncated_completions", "still counts"
    assert note in migrate("trl", f"{command} --loss_type dr_grpo", {}, PLUGINS)
    assert note in migrate("trl", command.replace("grpo", "rloo"), {}, PLUGINS)
    assert note not in migrate("trl", command, {}, PLUGINS), "the mean over tokens has none of their tokens"


@pytest.mark.parametrize(
    ("command", "dropout"),
    [("sft", 0.05), ("dpo", 0), ("dpo --lora_dropout 0.1", 0), ("dpo --disable_dropout false", 0.05), ("grpo", 0.05)],
)
def test_the_dropout_of_adapters_is_off_with_disable_dropout(command, dropout):
    """TRL sets the probability of every dropout of the model to 0, those of the adapters included."""
    lora = values(f"trl {command} --model_name_or_path M --dataset_name d.jsonl --use_peft")["trainer"]["lora"]
    assert lora.get("dropout", 0) == dropout


def test_label_smoothing_is_for_the_losses_that_read_it_in_trl():
    """sigmoid reads it here (conservative DPO) and in TRL before 1.0, but not in TRL 1.16."""
    dpo = "trl dpo --model_name_or_path M --dataset_name d.jsonl --label_smoothing 0.1"
    loss = values(f"{dpo} --loss_type robust")["algorithm"]["loss"]
    assert loss == {"loss_type": "robust", "label_smoothing": 0.1}
    assert values(f"{dpo} --loss_type hinge")["algorithm"]["loss"] == {"loss_type": "hinge"}
    text = migrate("trl", dpo, {}, PLUGINS)
    assert "loss" not in tomllib.loads(text)["algorithm"]
    assert "# To do: label_smoothing: TRL 1.16 does not read it with sigmoid" in text
    with pytest.raises(ConfigError, match="here sigmoid would read it too"):
        values(f"{dpo} --loss_type robust sigmoid")


def test_rewards_by_name():
    rewards = grpo("--reward_funcs accuracy_reward my.rewards.short --reward_weights 1 0.5")["reward"]
    assert [(r["use"], r.get("weight", 1)) for r in rewards] == [
        ("python:trl.rewards:accuracy_reward", 1),
        ("python:my.rewards:short", 0.5),
    ]
    text = migrate("trl", "trl grpo --reward_funcs own accuracy_reward --reward_weights 2 1", {}, PLUGINS)
    [reward] = tomllib.loads(text)["reward"]
    assert reward["use"] == "python:trl.rewards:accuracy_reward"
    assert "own (weight 2.0) are functions of the script" in text


def test_pairs_and_labels():
    run = values(
        "trl dpo --model_name_or_path M --dataset_name d.jsonl --loss_type sigmoid sft --beta 0.2 --eval_strategy epoch"
    )
    assert run["algorithm"]["loss"] == {"loss_type": ["sigmoid", "sft"], "beta": 0.2}
    assert run["data"]["eval"] == [{"path": "d.jsonl", "split": "test"}]
    dpo = "trl dpo --model_name_or_path M --dataset_name d.jsonl --num_processes 2"
    run = values(f"{dpo} --reference_free true")
    assert run["algorithm"]["loss"] == {"reference_free": True}
    assert "reference" not in run["placement"]
    assert "reference" in values(dpo)["placement"]
    reward = values("trl reward --model_name_or_path M --dataset_name d.jsonl --center_rewards_coefficient 0.01")
    assert reward["algorithm"]["use"] == "reward_model"
    assert reward["algorithm"]["loss"]["center_coef"] == 0.01


def test_a_script_is_read_and_not_executed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    text = migrate("trl", str(script), {}, PLUGINS)
    run = tomllib.loads(text)
    assert run["trainer"]["lr"] == 2e-6
    assert run["policy"]["model"] == "some/model"
    assert "To do: name the rewards" in text
    script.write_text("from trl import SFTConfig\nSFTConfig(\n  output_dir=folder())\n")
    with pytest.raises(ConfigError, match=r"train\.py, line 3: output_dir=folder\(\).*--set output_dir=VALUE"):
        migrate("trl", str(script), {}, PLUGINS)
    assert values(str(script), output_dir="there")["run"]["output"] == "there"
    script.write_text("parser = TrlParser((ScriptArguments, SFTConfig))\nSFTTrainer(model='M', args=parser.parse()[1])")
    with pytest.raises(ConfigError, match=r'"python train\.py --FLAG VALUE"'):
        migrate("trl", str(script), {}, PLUGINS)
    script.write_text("SFTConfig()\nDPOConfig()\n")
    with pytest.raises(ConfigError, match="SFTConfig in line 1, DPOConfig in line 2"):
        migrate("trl", str(script), {}, PLUGINS)


QUICKSTART = """
from trl import GRPOTrainer
from trl.rewards import accuracy_reward
from my.rewards import short
name = "M"
def main():
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map="auto",
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16))
    rows = load_dataset("d", "main", split="train[:50]")
    GRPOTrainer(model=model, train_dataset=rows, reward_funcs=[accuracy_reward, short],
        peft_config=LoraConfig(r=4, bias="none", target_modules=["q_proj"]))
"""


def test_a_trainer_without_a_configuration_has_its_data_model_and_rewards(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(QUICKSTART)
    run = values(str(script))
    assert (run["policy"]["model"], run["policy"]["storage"]) == ("M", "bf16")
    assert run["data"]["train"] == [{"path": "d", "subset": "main", "max_rows": 50}]
    rewards = [reward["use"] for reward in run["reward"]]
    assert rewards == ["python:trl.rewards:accuracy_reward", "python:my.rewards:short"]
    assert (run["trainer"]["lora"]["rank"], run["trainer"]["lora"]["quantization"]) == (4, "nf4")
    script.write_text(QUICKSTART.replace('50]")', '50]").map(f)'))
    assert "train" not in values(str(script))["data"], "rows that the script changes are not taken over"
    script.write_text(QUICKSTART.replace("reward_funcs", 'eval_dataset=load_dataset("e", split="test"), reward_funcs'))
    assert "train" not in values(str(script))["data"], "two data sets have no fields in TRL's own scripts"
    script.write_text(QUICKSTART.replace("train[:50]", "train[:5%]"))
    with pytest.raises(ConfigError, match="first N rows"):
        values(str(script))


def test_a_name_has_the_last_value_above_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("out = 'a'\nout = 'b'\nSFTConfig(output_dir=out)\nout = 'c'\n")
    assert values(str(script))["run"]["output"] == "b"
    script.write_text("out = 'a'\nif True:\n  out = 'b'\nSFTConfig(output_dir=out)\n")
    with pytest.raises(ConfigError, match="output_dir=out is not a literal"):
        values(str(script))


@pytest.mark.parametrize(
    ("script", "trainer"),
    [("gspo.py", "grpo"), ("dpo_vlm.py", "dpo"), ("run_sft.py", "sft"), ("reward_modeling.py", "reward_model")],
)
def test_scripts_that_are_called_like_a_trainer(script, trainer):
    text = migrate("trl", f"python examples/{script} --model_name_or_path M --report_to trackio", {}, PLUGINS)
    assert tomllib.loads(text)["algorithm"]["use"] == trainer
    assert "only its flags are read" in text
    assert "report_to trackio: rlhf has no such observer" in text


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_files_of_fields_say_their_trainer_by_their_fields(form, tmp_path):
    file = tmp_path / f"config.{form}"
    fields = {"learning_rate": "1e-5", "num_generations": 4, "loss_type": "dapo", "report_to": ["none"]}
    file.write_text(json.dumps(fields) if form == "json" else "".join(f"{k}: {v}\n" for k, v in fields.items()))
    assert values(str(file))["trainer"]["lr"] == 1e-5
    run = values(f"trl grpo --config {file} --learning_rate 3e-5")
    assert run["trainer"]["lr"] == 3e-5, "flags have precedence"
    file.write_text('{"learning_rate": 1e-5}')
    with pytest.raises(ConfigError, match="grpo, rloo, sft"):
        values(str(file))
    config = tmp_path / "config_sft.yaml"
    config.write_text("learning_rate: 1e-5\n")
    assert values(str(config))["algorithm"]["use"] == "sft", "the name says which, where the fields do not"


def test_recipes_of_open_r1(tmp_path):
    file = tmp_path / "config_sft.yaml"
    template = "{% for m in messages %}" + "{{ m.content }} " * 50 + "{% endfor %}"
    parts = [
        {"id": "o/a", "config": "c", "split": "s", "columns": ["x"], "weight": 0.5},
        {"id": "o/a", "weight": 1.0},
        {"id": "o/b"},
    ]
    fields = {"model_name_or_path": "M", "system_prompt": "S", "dataset_prompt_column": "problem",
              "chat_template": template, "dataset_mixture": {"datasets": parts, "seed": 3}}  # fmt: skip
    file.write_text(json.dumps(fields))  # JSON is YAML
    text = migrate("trl", str(file), {}, PLUGINS)
    data = tomllib.loads(text)["data"]
    assert (data["system"], data["prompt"]) == ("S", "problem")
    assert data["train"] == [
        {"path": "o/a", "subset": "c", "split": "s", "name": "a_0"}, {"path": "o/a", "name": "a_1"}, {"path": "o/b"}
    ]  # fmt: skip
    lines = " ".join(text.replace("#", " ").split())
    assert "takes a share of 0.5 of the rows of o/a; here all rows are read: set max_rows of data.train.0" in lines
    assert "save the text of chat_template as a file, and set data.chat_template to it" in lines
    assert text.count("m.content") < 20
    assert "held-out" not in lines
    fields["dataset_mixture"]["test_split_size"] = 0.1
    file.write_text(json.dumps(fields))
    assert "name held-out rows as data.eval" in migrate("trl", str(file), {}, PLUGINS)
    file.write_text(json.dumps(fields | {"dataset_mixture": {"datasets": [{"path": "x"}]}}))
    with pytest.raises(ConfigError, match="it needs a list of datasets, each with an id"):
        migrate("trl", str(file), {}, PLUGINS)


@pytest.mark.parametrize(
    ("flags", "telling"),
    [
        ("--learning_rat 1", "learning_rate"),
        ("--use_adaptive_entropy true", "use_adaptive_entropy"),
        *((f"--entropy_coef 0.01 {loss}", "TRL's bonus is the mean entropy") for loss in OTHER_MEANS),
        ("--use_adaptive_entropy true --entropy_coef 0.1 --entropy_coef_min 0.01", "entropy_coef_min"),
        ("--num_generations 3", "num_generations"),
        ("--num_generations 0", "num_generations 0: it must be at least 1"),
        ("--per_device_train_batch_size 0", "per_device_train_batch_size 0: it must be at least 1"),
        ("--gradient_accumulation_steps 0", "gradient_accumulation_steps 0: it must be at least 1"),
        ("--use_vllm --vllm_tensor_parallel_size 0", "vllm_tensor_parallel_size 0: it must be at least 1"),
        ("--lr_scheduler_type inverse_sqrt", "without a warm-up, inverse_sqrt of transformers falls over 10,000 steps"),
        ("--use_vllm --vllm_structured_outputs_regex x", "answers cannot be restricted to a pattern"),
        *(
            (f"--use_vllm --vllm_importance_sampling_mode {mode}", "token or sequence, with _truncate or _mask")
            for mode in ("token_clip", "turn_mask")
        ),
        ("--use_peft --lora_target_parameters experts.gate_up_proj", "adapters are of linear layers"),
        ("--use_peft --load_in_4bit --bnb_4bit_quant_type fp4", "only nf4 is supported"),
        ("--fp16", "fp16"),
        ("--optim adafactor", "adafactor"),
        ("--repetition_penalty 1.1", "repetition_penalty"),
        ("--generation_kwargs '{\"x\": 1}'", "generation_kwargs"),
        ("--gradient_accumulation_steps 3 --steps_per_generation 2", "gradient_accumulation_steps"),
        *(
            (f"--gradient_accumulation_steps 4 --steps_per_generation 1 {statistic}", "gradient_accumulation_steps")
            for statistic in ("--scale_rewards batch", "--multi_objective_aggregation normalize_then_sum")
        ),
        ("--packing", "packing is an option of other entry points"),
    ],
)
def test_what_means_nothing_here_is_refused(flags, telling):
    with pytest.raises(ConfigError, match=telling):
        grpo(flags)


def test_packed_batches_and_clipped_rewards_are_refused():
    with pytest.raises(ConfigError, match="packing"):
        values("trl sft --packing")
    with pytest.raises(ConfigError, match="reward_clip_range"):
        values("trl rloo --reward_clip_range 0 1")


@pytest.mark.parametrize("name", ["sft", "dpo", "grpo"])
def test_migrated_runs_start(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_model("model", hidden=16, heads=2, kv_heads=1, chat_template=CHAT_TEMPLATE)
    row = {"prompt": "1+1=", "completion": "2"} if name == "sft" else {"prompt": "1", "chosen": "1", "rejected": "2"}
    Path("rows.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    Path("own.py").write_text("def short(completions, **columns):\n    return [0.0 for c in completions]\n")
    text = migrate("trl", f"trl {name} --model_name_or_path model --dataset_name rows.jsonl", {}, PLUGINS)
    Path("run.toml").write_text(text)
    reward = ["--reward", "file:own.py"] if name == "grpo" else []
    assert main(["train", "run.toml", "--dry-run", *reward]) == 0, capsys.readouterr().err


def test_methods_of_this_year_have_their_counterparts():
    vespo = grpo("--loss_type vespo --vespo_k_neg 4 --use_vllm true")["algorithm"]
    assert vespo["loss"] == {"use": "vespo", "k_negative": 4.0}
    assert grpo("--multi_objective_aggregation normalize_then_sum")["algorithm"]["advantage"] == {"use": "gdpo"}
    adaptive = grpo("--use_adaptive_entropy true --entropy_coef 0.1 --entropy_target 0.5")["algorithm"]
    assert adaptive["entropy"] == {"target": 0.5}
    assert adaptive["loss"]["entropy_coef"] == 0.1
