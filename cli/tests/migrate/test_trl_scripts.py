"""Python scripts and notebooks for TRL, in the forms that people write."""

import json
import tomllib

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.migrate.find import migrate

PLUGINS = Plugins.discover()
ARGPARSE = """
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-6)
    parser.add_argument("--out-dir", dest="out", default="runs")
    parser.add_argument("--no-bf16", action="store_true")
    args = parser.parse_args()
    return args
"""


RPO = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, command="", name="train.py", **variables):
        (tmp_path / name).write_text(text)
        text = migrate("trl", f"python {name} {command}" if command else name, variables, PLUGINS)
        return tomllib.loads(text) | {"text": text}

    return write


@pytest.mark.parametrize(
    ("preamble", "expression"),
    [
        (f"{ARGPARSE}\nif __name__ == '__main__':\n    args = parse_args()", "args.lr"),
        (f"{ARGPARSE}\ndef main(options): pass\nargs = parse_args()", "args.lr if args.out == 'runs' else 1"),
        ("@dataclass\nclass C:\n    lr: float = field(default=2e-6)\nc = C()", "c.lr"),
        ("@dataclass\nclass B:\n    lr: float = 1\nclass C(B): pass\nc = C(lr=2e-6)", "c.lr"),
        ("class C:\n    lr = 2e-6", "C.lr"),
        (
            "class S:\n    lr: float = 2e-6\np = HfArgumentParser((S, SFTConfig))\ns, o = p.parse_args_and_config()",
            "s.lr",
        ),
        ("c = {'optim': {'lr': 1e-6}}", "c['optim']['lr'] * 2"),
        ("c = {'lr': 2e-6}", "c.get('lr', 1)"),
        ("", "float(os.environ.get('LR', '2e-6'))"),
        ("def f():\n    lr = 5\nlr = 2e-6", "lr"),
        ("lr = 1\nlr = 2e-6", "lr"),
        ("", "(2 * [2e-6])[round(1.4, 1) > 1] if 'ab' * 2 == 'a%s' % 'bab' else 1"),
    ],
)  # fmt: skip
def test_values_that_a_script_states_are_read(script, preamble, expression):
    text = f"{preamble}\n{'    ' if '__main__' in preamble else ''}x = SFTConfig(learning_rate={expression})\n"
    assert script(text)["trainer"]["lr"] == 2e-6


@pytest.mark.parametrize(
    ("preamble", "expression"),
    [
        ("", "len('a' * 10000000000000)"),
        ("", "len(10000000000000 * [1])"),
        ("", "len('%10000000000000d' % 1)"),
        ("a = 'a' * 90000", "len(a.replace('a', a))"),
        ("a = 'a' * 90000", "len(a.join(a))"),
        ("\n".join(["a0 = 'ab'", *(f"a{n} = f'{{a{n - 1}}}' + a{n - 1}" for n in range(1, 60))]), "len(a59)"),
        ("\n".join(["a0 = 2", *(f"a{n} = a{n - 1} * a{n - 1}" for n in range(1, 60))]), "1 if a59 else 0"),
        ("\n".join(["a0 = 2", *(f"a{n} = a{n - 1} + a{n - 1}" for n in range(1, 60))]), "1 if a59 else 0"),
        ("\n".join(["a0 = [1]", *(f"a{n} = [a{n - 1}] * 9" for n in range(1, 60))]), "len(a59)"),
    ],
)  # fmt: skip
def test_values_that_fit_in_no_memory_are_refused(script, preamble, expression):
    with pytest.raises(ConfigError, match="--set num_train_epochs=VALUE"):
        script(f"{preamble}\nx = SFTConfig(num_train_epochs={expression})\n")


def test_the_only_call_of_a_function_gives_its_parameters(script):
    text = "def train(lr, epochs=2):\n    SFTConfig(learning_rate=lr, num_train_epochs=epochs)\ntrain(3e-6)\n"
    run = script(text)
    assert (run["trainer"]["lr"], run["run"]["epochs"]) == (3e-6, 2)
    with pytest.raises(ConfigError, match="--set learning_rate=VALUE"):
        script(f"{text}train(4e-6)\n")


def test_flags_of_the_command_are_those_of_its_parser(script):
    arguments = "learning_rate=args.lr, output_dir=args.out, bf16=not args.no_bf16"
    text = f"{ARGPARSE}\nargs = parse_args()\nSFTConfig({arguments})\n"
    run = script(text, "--lr 5e-6 --out-dir there --no-bf16 --other 1")
    assert (run["trainer"]["lr"], run["policy"]["dtype"]) == (5e-6, "fp32")
    assert "--other 1" in run["text"].partition("[run]")[0], "a flag that nothing here reads is a remark"


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("o = {'learning_rate': 3e-6}\nSFTConfig(**o)", ("trainer", "lr"), 3e-6),
        ("o = SFTConfig()\no.learning_rate = 3e-6\nSFTTrainer(args=o)", ("trainer", "lr"), 3e-6),
        ("SFTTrainer(args=TrainingArguments(learning_rate=3e-6), max_seq_length=77)", ("data", "max_tokens"), 77),
        ("SFTConfig(optim='paged_adamw_8bit', bf16=torch.cuda.is_bf16_supported())", ("policy", "dtype"), "bf16"),
        ("DPOConfig(rpo_alpha=0.5)", ("algorithm", "loss"), RPO),
        (
            "m, t = FastLanguageModel.from_pretrained(model_name='M')\n"
            "m = FastLanguageModel.get_peft_model(m, r=8, random_state=1)\nSFTTrainer(model=m, args=SFTConfig())",
            ("policy", "model"),
            "M",
        ),
        (
            "model = AutoModelForCausalLM.from_pretrained('M').to('cuda')\nmodel = get_peft_model(model, cfg)\n"
            "SFTTrainer(model=model, args=SFTConfig())",
            ("policy", "model"),
            "M",
        ),
    ],
)  # fmt: skip
def test_forms_of_configurations_and_models(script, text, key, expected):
    run = script(text)
    section, name = key
    assert run[section][name] == expected


@pytest.mark.parametrize("name", ["TrainingArguments", "Seq2SeqTrainingArguments"])
def test_training_arguments_have_defaults_of_their_own(script, name):
    """SFTTrainer converts them to an SFTConfig with all their values, of which three have other defaults."""
    run = script(f"SFTTrainer(args={name}(output_dir='o'))")
    assert (run["trainer"]["lr"], run["policy"]["dtype"]) == (5e-5, "fp32")
    assert run["policy"].get("gradient_checkpointing", False) is False
    assert f"{name}'s learning_rate" in run["text"]
    run = script(f"SFTTrainer(args={name}(learning_rate=1e-5, bf16=True, gradient_checkpointing=True))")
    assert (run["trainer"]["lr"], run["policy"]["dtype"]) == (1e-5, "bf16")
    assert run["policy"]["gradient_checkpointing"] is True
    assert script("SFTTrainer(args=SFTConfig())")["trainer"]["lr"] == 2e-5


def test_what_changes_in_a_way_that_is_not_read_is_refused_or_named(script):
    with pytest.raises(ConfigError, match=r"line 3: .*--set learning_rate=VALUE"):
        script("o = SFTConfig()\nif x:\n    o.learning_rate = 1\nSFTTrainer(args=o)")
    text = "o = SFTConfig()\nif x:\n    o.learning_rate = 1\n    o.project = f()\nSFTTrainer(args=o)"
    assert script(text, learning_rate="3e-6")["trainer"]["lr"] == 3e-6
    with pytest.raises(ConfigError, match=r"SFTConfig\(\*\*o\) is computed by code.*\n.*--allow-unknown"):
        script("o = make()\nSFTConfig(**o)")
    text = script("SFTTrainer(args=SFTConfig(), data_collator=c, callbacks=[stop])")["text"]
    assert "data_collator=c of the trainer is not read" in text
    assert "callbacks=[stop]" in text
    text = script("GRPOTrainer(args=GRPOConfig(), reward_funcs=[own])")["text"]
    assert "the script's rewards are own" in text
    with pytest.raises(ConfigError, match=r"line 1.*line 2.*--set line=N"):
        script("SFTConfig()\nSFTConfig()")
    assert script("SFTConfig(seed=1)\nSFTConfig(seed=2)", line="2")["run"]["seed"] == 2
    two = "p = LoraConfig(r=4)\nSFTTrainer(args=SFTConfig(), peft_config=p)\nSFTTrainer(args=SFTConfig())\n"
    assert script(two, line="2")["trainer"]["lora"]["rank"] == 4
    assert "lora" not in script(two, line="3")["trainer"], "the adapter of another trainer"


def test_arguments_without_names_are_read(script):
    run = script("def f(): pass\nGRPOTrainer('M', f, GRPOConfig('o', beta=0.1, num_generations=8))")
    assert (run["policy"]["model"], run["run"]["output"], run["algorithm"]["kl"]["coef"]) == ("M", "o", 0.1)
    assert "the script's rewards are f" in run["text"]
    run = script("DPOTrainer('M', ref, args=DPOConfig())")
    assert run["policy"]["model"] == "M"
    assert "ref_model=ref of the trainer is not read" in run["text"]
    with pytest.raises(ConfigError, match="only the first 5 arguments of SFTTrainer"):
        script("SFTTrainer(m, SFTConfig(), c, d, e, t)")


def test_values_on_which_no_run_depends_are_read_as_text(script):
    text = "GRPOConfig(hub_model_id=f(), hub_token=g(), logging_steps=h())\nLoraConfig(task_type=TaskType.CAUSAL_LM)\n"
    text = script(text)["text"]
    assert "hub_model_id=f(): a run writes to its folder only" in text
    assert "task_type=TaskType.CAUSAL_LM: the algorithm decides the head" in text
    assert "g()" not in text


def test_arguments_of_a_trainer_are_read_or_named(script):
    quantized = "b = BitsAndBytesConfig(load_in_8bit=True)\nSFTTrainer(peft_config=LoraConfig(), quantization_config="
    assert script(f"{quantized}b)")["trainer"]["lora"]["quantization"] == "int8"
    with pytest.raises(ConfigError, match=r"quantization_config is unknown.*\n--allow-unknown"):
        script(f"{quantized}FP8())")
    text = script("GRPOTrainer('M', args=GRPOConfig(), tools=[f], environment_factory=Env, optimizers=(o, s))")["text"]
    for name in ("tools=[f]", "environment_factory=Env", "optimizers=(o, s)"):
        assert f"{name} of the trainer is not read" in " ".join(text.replace("\n#", " ").split())
    with pytest.raises(ConfigError, match="own is unknown"):
        script("SFTTrainer('M', own=f())")
    assert "own" in migrate("trl", "train.py", {}, PLUGINS, allow_unknown=True)


def test_cells_of_a_notebook_are_a_script(script):
    cells = ["!pip install trl \\\n  peft\n%load x\n", "%%bash\nls", "SFTConfig(seed=5)\n"]
    cells = [{"cell_type": "code", "source": [cell]} for cell in cells]
    assert script(json.dumps({"cells": cells}), name="train.ipynb")["run"]["seed"] == 5


def test_all_problems_are_named_at_once_and_options_have_the_values_of_set(script):
    text = "SFTConfig(learning_rate=f(), seed=g(), own_option=1)\n"
    with pytest.raises(ConfigError, match=r"(?s)learning_rate=VALUE.*seed=VALUE.*own_option is unknown"):
        script(text)
    run = migrate(
        "trl", "train.py", {"learning_rate": "1e-3", "seed": "3", "packing": "false"}, PLUGINS, allow_unknown=True
    )
    assert tomllib.loads(run)["run"]["seed"] == 3
    assert "own_option" in run.partition("[run]")[0]
    with pytest.raises(ConfigError, match="learning_rat is unknown"):
        script("SFTConfig()", learning_rat="1")


def test_defaults_of_earlier_versions_are_a_remark(script):
    assert "beta 0.04 until 0.18" in script("GRPOConfig(num_generations=8)")["text"]
    assert "beta 0.04 until 0.18" not in script("GRPOConfig(beta=0.0)")["text"]
