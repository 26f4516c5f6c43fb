"""``--dry-run`` refuses what a run would refuse, before anything is started. So does ``rlhf plan``, except for
checks of the machine."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_cli.main import main
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.model import load_model
from rlhf_modeling.option_checks import LEARNING
from rlhf_modeling.skeleton import check_files, skeleton
from rlhf_runtime.config import components
from rlhf_runtime.setup import build
from rlhf_testing.tiny import tiny_model, tiny_reward_model
from safetensors.torch import load_file, save_file

from tests.runs import Workshop
from tests.support.tiny_architectures import tiny_architecture

ON_RAY, VLLM, ZERO = ({"launcher": {"use": "ray"}}, {"generator": {"use": "vllm"}}, {"trainer": {"use": "deepspeed"}})

EVERYWHERE: dict[str, tuple[str, dict[str, Any], str]] = {
    "engines elsewhere": (
        "grpo", ON_RAY, "generator 'transformers' samples from a trainer's module in the same process",
    ),
    "no engines": ("grpo", {"launcher": {"use": "simulated"}}, "which launcher 'simulated' does not provide"),
    "one rank": (
        "sft", ON_RAY | {"placement": {"policy": {"ranks": 2}}}, "role 'policy' asks for 2. Use --trainer.use fsdp",
    ),
    "one process": (
        "sft", {"placement": {"policy": {"ranks": 2}}}, "has one process and one device. Use --launcher.use processes",
    ),
    "folder of reports": (
        "sft", {"launcher": {"use": "processes", "reports": __file__}},
        "launcher.reports: ... cannot be a folder",
    ),
    "environment of workers": (
        "sft", {"launcher": {"use": "processes", "env": {"A=B": "1"}}},
        "'A=B' = '1' is not a valid environment variable",
    ),
    "parts": (
        "sft", {"trainer": {"use": "deepspeed", "tensor_parallel": 2}}, "tensor_parallel = 2 does not divide the 1 ",
    ),
    "transport": (
        "grpo", VLLM | {"sync": {"transport": "store"}}, "launcher 'local' passes weights within one process",
    ),
    "heads": (
        "sft", ON_RAY | {"trainer": {"use": "deepspeed", "tensor_parallel": 5}, "placement": {"policy": {"ranks": 5}}},
        "tensor_parallel = 5 does not divide Qwen3ForCausalLM's num_attention_heads",
    ),
    "rows over ranks": (
        "sft", {"trainer": {"use": "fsdp", "sequence_parallel": 2}},
        "sequence_parallel = 2 does not divide the 1 ranks of role 'policy': set placement.policy.ranks = 2, or",
    ),
    "heads over ranks": (
        "sft", ON_RAY | {"trainer": {"use": "fsdp", "sequence_parallel": 5}, "placement": {"policy": {"ranks": 5}}},
        "sequence_parallel = 5 does not divide the 2 attention heads of Qwen3ForCausalLM",
    ),
    "rows and layers over ranks": (
        "sft", {"trainer": {"use": "deepspeed", "sequence_parallel": 2, "tensor_parallel": 2}},
        "tensor_parallel = 2 cannot be combined with sequence_parallel = 2, which divides the same heads over ranks",
    ),
    "temperature": ("grpo", VLLM | {"sampling": {"temperature": 0.001}}, "sampling.temperature is 0.001; it must be 0"),
    "cache": ("grpo", {"generator": {"max_cache_tokens": 6}}, "do not fit into generator.max_cache_tokens = 6"),
    "model without a name": ("grpo", {"policy": {"model": ""}}, "named for the role 'policy'; set --policy.model PATH"),
    "no layers for adapters": (
        "sft", {"trainer": {"lora": {"rank": 2, "targets": []}}}, "lora.targets ... should have at least 1 item",
    ),
    "adapters of no layer": (
        "sft", {"trainer": {"lora": {"rank": 2, "targets": ["q_prj"]}}},
        "no linear layer is called q_prj; allowed: down_proj, ... v_proj. Did you mean 'q_proj'?",
    ),
    "adapters of no layer, of a critic": (
        "ppo", {"critic": {"trainer": {"lora": {"rank": 2, "targets": ["c_attn"]}}}},
        "no linear layer is called c_attn; allowed:",
    ),
    "no experts": (
        "sft", {"trainer": {"aux_loss_coef": 0.1}}, "aux_loss_coef = 0.1: Qwen3ForCausalLM has no experts to balance",
    ),
    "reference": (
        "dpo", {"reference": {"trainer": {"lr": 1e-4, "lora": {"rank": 2}}}},
        "reference.trainer.lora ... reference.trainer.lr ... : reference is not trained, so nothing reads it. Remove",
    ),
    "reward model": (
        "grpo",
        {"reward": [{"use": "model", "model": "MODEL"}], "roles": {"reward_model": {"trainer": {"ema_decay": 0.9}}}},
        "roles.reward_model.trainer.ema_decay ... : reward_model is not trained, so",
    ),
}  # fmt: skip
"""{case: (algorithm, changes, parts of the message)}."""
MACHINE_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "flash": ("sft", {"trainer": {"attention": "flash"}}, "trainer.attention = 'flash' is not available: "),
    "liger": ("sft", {"trainer": {"kernels": "liger"}}, "trainer.kernels = 'liger' is not available: Liger's kernels "),
    "liger on ranks": (
        "sft", ON_RAY | {"trainer": {"use": "deepspeed", "kernels": "liger"}},
        "trainer.kernels = 'liger' is not available",
    ),
    "cuda": ("sft", {"trainer": {"device": "cuda"}}, "device = 'cuda' but torch"),
    "memory share": (
        "grpo", VLLM | {"generator": {"use": "vllm", "memory_share": 0.5}}, "does not support memory_share = ",
    ),
}  # fmt: skip
"""Options that a CPU does not support; ``rlhf plan`` accepts them, because it may plan for another machine."""


JUDGE = """
from rlhf.interfaces import Reward
from rlhf.types import RewardResult, RoleSpec


class Judge(Reward):
    name = "judge"

    def roles(self):
        return (RoleSpec("judge", head="scalar"),)

    async def setup(self, context):
        self.ask = context.score_with_role

    async def score(self, group):
        return [RewardResult(v) for v in await self.ask("judge", [t.turns[0].ids for t in group.trajectories])]
"""


def execute(*words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, " ".join((out.getvalue() + err.getvalue()).split())


def run_file(tiny: Workshop, name: str, algorithm: str, changes: dict[str, Any]) -> str:
    config = tiny.config(algorithm, f"preflight {name}", **changes)
    for reward in config.get("reward", ()):
        if "model" in reward:
            reward["model"] = str(tiny.model)
    return tiny.arguments(config)[1]


def needed(changes: dict[str, Any]) -> None:
    for kind, name in (("launcher", "ray"), ("trainer", "deepspeed"), ("generator", "vllm")):
        if changes.get(kind, {}).get("use") == name and find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", EVERYWHERE)
def test_refused_by_a_dry_run_and_by_a_plan(tiny, name):
    algorithm, changes, message = EVERYWHERE[name]
    needed(changes)
    path = run_file(tiny, name, algorithm, changes)
    for words in (("train", path, "--dry-run"), ("plan", path, "--device", "cpu", "--device-memory", "64GiB")):
        code, text = execute(*words)
        assert code == 2
        assert all(part in text for part in message.split(" ... "))
    assert not (tiny.folder / f"preflight {name}").exists()


def test_a_model_whose_memory_cannot_be_estimated_is_trained(shop):
    """BLT has four parts with layers of their own, and no number of layers in its config."""
    model = tiny_architecture(shop.folder / "blt", "blt")
    config = shop.config("sft", "blt run", policy={"model": str(model)}, run={"steps": 1})
    arguments = shop.arguments(config)
    code, text = execute(*arguments, "--dry-run")
    assert code == 0, text
    assert "placement and memory: not estimated: cannot plan with BltForCausalLM" in text
    assert execute("plan", arguments[1])[0] == 1
    code, text = execute(*arguments)
    assert code == 0, text


def test_what_is_read_before_the_first_step_is_read_by_a_dry_run(shop):
    """Held-out rows, a recording, the scale of a reward model: each refused before a model is loaded."""
    long = str(shop.rows("long.jsonl", [{"prompt": "9" * 80, "answer": "1"}]))
    tiny_reward_model(shop.folder / "rm", hidden=16, heads=2, kv_heads=1)
    scaled = {"use": "model", "model": str(shop.folder / "rm"), "normalise": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": {"eval": long}}, "the prompt has 80 tokens; data.max_tokens = 64 leaves no room to answer"),
        (
            {"rollout": {"use": "replay", "path": str(shop.folder / "no")}},
            "neither a file nor a folder with step-*.arrow",
        ),
        ({"rollout": {"use": "replay", "path": long}}, "long.jsonl:1 is not a recorded sample"),
        ({"reward": [scaled]}, "normalise = true needs the numbers `mean` and `std` > 0"),
    ]
    for number, (changes, message) in enumerate(cases):
        path = shop.arguments(shop.config("rloo", f"read{number}", **changes))[1]
        code, text = execute("train", path, "--dry-run")
        assert code != 0
        assert message in text


@pytest.mark.parametrize(("use", "option"), [("tensorboard", "folder"), ("mlflow", "tracking_uri")])
def test_an_observer_with_an_impossible_folder_is_refused_before_models_are_loaded(shop, use, option, monkeypatch):
    if find_spec(use) is None:
        pytest.skip(f"{use} is not installed")
    observer = [{"use": use, option: str(shop.data / "below")}]
    path = shop.arguments(shop.config("sft", "observed", observer=observer))[1]
    monkeypatch.setattr(build, "launch_roles", lambda *_: pytest.fail("models are loaded"))
    for words in (("train", path, "--dry-run"), ("train", path)):
        code, text = execute(*words)
        assert code == 2
        assert (
            f"observer '{use}', {option}: {shop.data / 'below'} cannot be a folder, because {shop.data} is a file"
            in text
        )


def test_a_missing_login_is_refused_before_models_are_loaded(shop, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for words in ((), ("--dry-run",)):
        path = shop.arguments(shop.config("sft", "logged", observer=[{"use": "wandb"}]))[1]
        with monkeypatch.context() as patch:
            patch.setattr(build, "launch_roles", lambda *_: pytest.fail("models are loaded"))
            code, text = execute("train", path, *words)
        assert code == 2
        assert "observer 'wandb' could not start: no API key is configured. Set WANDB_API_KEY in" in text
    path = shop.arguments(shop.config("sft", "unlogged", observer=[{"use": "wandb", "mode": "offline"}]))[1]
    assert execute("train", path, "--dry-run")[0] == 0


def test_a_policy_that_cannot_be_sampled_from_is_refused_by_its_config(shop):
    mamba = tiny_model(shop.folder / "mamba", architecture="mamba", hidden=16, heads=2)
    code, text = execute("train", run_file(shop, "mamba", "rloo", {"policy": {"model": str(mamba)}}), "--dry-run")
    assert code == 1
    assert "MambaForCausalLM" in text
    assert "the generator 'transformers' cannot sample from it" in text
    changes = {"policy": {"model": str(shop.folder / "short")}, "sampling": {"max_new_tokens": 40}}
    configured(max_position_embeddings=41)(Path(shutil.copytree(shop.model, shop.folder / "short")))
    path = run_file(shop, "short", "rloo", changes)
    assert execute("train", path, "--dry-run")[0] == 0
    configured(max_position_embeddings=40)(shop.folder / "short")
    skeleton.cache_clear()
    code, text = execute("train", path, "--dry-run")
    assert code == 2
    assert "a prompt and max_new_tokens = 40 do not fit into the positions of" in text


def without(name: str) -> Callable[[Path], object]:
    """A function that removes a tensor from a model's file."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors[name]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def configured(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-64])


def indexed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weights = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def integers(file: Path, name: str) -> None:
    """Say in the file's header that a tensor holds 32-bit integers."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header[name]["dtype"] = "I32"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(data[:8] + text + data[end:])


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), "the file model.safetensors is missing"),
    "no part": (indexed, "the file model-00001-of-00002.safetensors is missing"),
    "cut": (cut, "Error while deserializing header"),
    "a pickle": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        "has its weights only in pytorch_model.bin, which rlhf does not read",
    ),
    "a tensor less": (without("model.norm.weight"), "lacks 1 weights of a Qwen3ForCausalLM"),
    "more layers": (configured(num_hidden_layers=3, layer_types=None), "weights of a Qwen3ForCausalLM"),
    "no name of a class": (
        configured(architectures=[None]),
        "architectures is [None], but must be a list of class names",
    ),
    "no list of classes": (configured(architectures=5), "architectures is 5, but must be a list of class names"),
    "integers": (
        lambda folder: integers(folder / "model.safetensors", "model.norm.weight"),
        "stores 'model.norm.weight' as integers (I32)",
    ),
    "a classifier": (
        configured(architectures=["Qwen3ForSequenceClassification"]),
        "is a Qwen3ForSequenceClassification, which does not generate text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_loaded_is_refused_by_its_headers(shop, name, monkeypatch):
    if name in ("a tensor less", "more layers"):
        pytest.importorskip("accelerate")
    change, message = MODELS[name]
    change(Path(shutil.copytree(shop.model, shop.folder / "model")))
    path = run_file(shop, name, "sft", {"policy": {"model": str(shop.folder / "model")}})
    code, text = execute("train", path, "--dry-run")
    assert code == 1
    assert message in text
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it started"))
    assert execute("train", path)[0] == 1


def test_a_reward_model_that_cannot_be_loaded_is_refused_by_its_headers(shop):
    pytest.importorskip("accelerate")
    tiny_reward_model(shop.folder / "rm", hidden=16, heads=2, kv_heads=1)
    reward = [{"use": "model", "model": str(shop.folder / "rm")}]
    path = shop.arguments(shop.config("rloo", "rm", reward=reward))[1]
    assert execute("train", path, "--dry-run")[0] == 0
    without("score.weight")(shop.folder / "rm")
    code, text = execute("train", path, "--dry-run")
    assert code == 1
    assert "role 'reward_model' lacks 1 weights of a Qwen3ForSequenceClassification" in text


@pytest.mark.parametrize("reward", ["model", "file"])
def test_a_run_refuses_a_language_model_as_reward_model(shop, reward, monkeypatch):
    """Its head would be random, and nothing trains it."""
    changes: dict[str, Any] = {"reward": [{"use": "model", "model": str(shop.model)}]}
    if reward == "file":
        judge = shop.file("judge.py", JUDGE)
        changes = {"reward": [{"use": f"file:{judge}"}], "roles": {"judge": {"model": str(shop.model)}}}
    path = shop.arguments(shop.config("rloo", "random", **changes))[1]
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it started"))
    for words in (("train", path, "--dry-run"), ("train", path)):
        code, text = execute(*words)
        assert code == 1, text
        assert "is a Qwen3ForCausalLM, which has no trained 'scalar' head, and this run does not train the role" in text
        assert "Use a sequence-classification model with 1 label" in text


def test_score_and_eval_refuse_a_language_model_as_reward_model(shop, monkeypatch):
    monkeypatch.setattr("rlhf_runtime.jobs.scoring.launch_roles", lambda *_: pytest.fail("it started"))
    monkeypatch.setattr("rlhf_runtime.jobs.inference.launch_roles", lambda *_: pytest.fail("it started"))
    shared = ("--model", str(shop.model), "--data", str(shop.data), "--reward", f"model:{shop.model}")
    for words in (("score", *shared, "--answers", "response", "-o", str(shop.folder / "out.jsonl")), ("eval", *shared)):
        code, text = execute(*words)
        assert code == 1
        assert "which has no trained 'scalar' head, and this run does not train the role" in text


def test_a_role_that_is_trained_may_start_from_a_language_model(shop):
    for algorithm in ("ppo", "reward_model"):
        code, text = execute("train", shop.arguments(shop.config(algorithm, algorithm))[1], "--dry-run")
        assert code == 0, text


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "gemma2"])
def test_models_that_can_be_loaded_are_not_refused(tmp_path, architecture):
    """Converted, fused and shared weights included."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = tiny_model(tmp_path, architecture=architecture, **(experts if "moe" in architecture else {}))
    for head in ("lm", "scalar"):
        spec = ModelSpec(RoleSpec("policy", head=head, trained=True), str(path))
        check_files(spec)
        load_model(spec, torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("name", MACHINE_CASES)
def test_refused_by_a_dry_run_for_this_machine(tiny, name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    algorithm, changes, message = MACHINE_CASES[name]
    needed(changes)
    path = run_file(tiny, name, algorithm, changes)
    code, text = execute("train", path, "--dry-run")
    assert code == 2
    assert message in text


def test_a_frozen_role_ignores_options_of_training(tiny):
    changes = {"trainer": {"lr": 1e-3, "ema_decay": 0.9}, "reference": {"trainer": {"logits_chunk": 4096}}}
    code, text = execute("train", run_file(tiny, "inherits", "dpo", changes), "--dry-run")
    assert code == 0, text


def test_commands_that_only_sample_accept_a_section_for_training(tiny):
    path = run_file(tiny, "answers", "grpo", {"policy": {"trainer": {"lr": 1e-3}}})
    code, text = execute("eval", path, "--eval.max_rows", "1", "--eval.max_new_tokens", "2")
    assert code == 0, text


def test_every_option_of_training_is_classified():
    """A new option is one of training, which a frozen role refuses, or must be listed here."""
    computing = {"shared_prefixes", "attention", "kernels", "logits_chunk", "head_fp32", "quantization"}
    computing |= {"deterministic"}
    assert LEARNING | computing == TrainingConfig.model_fields.keys()
    assert not LEARNING & computing


@pytest.mark.parametrize("words", [["train", "--dry-run"], ["train"], ["plan"]], ids=" ".join)
def test_the_options_of_each_plugin_are_checked_once(tiny: Workshop, monkeypatch, words: list[str]) -> None:
    checked, check = list[str](), components.options_config

    def count(resolved: Any, options: Any, path: str, *rest: Any, **keywords: Any) -> Any:
        checked.append(path)
        return check(resolved, options, path, *rest, **keywords)

    monkeypatch.setattr(components, "options_config", count)
    name = f"once {' '.join(words)}"
    config = tiny.config("ppo", name, run={"steps": 1}, critic={"trainer": {"lr": 1e-4}})
    run_file = tiny.arguments(config)[1]
    finished = tiny.command(words[0], run_file, *words[1:])
    assert finished.code == 0, finished.said
    plugins = ["launcher", "trainer", "critic.trainer", "generator", "rollout", "reward.0"]
    assert sorted(checked) == sorted(
        ["algorithm", *(f"algorithm.{slot}" for slot in ("advantage", "loss", "value_loss")), *plugins]
    )
