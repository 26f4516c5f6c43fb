"""One rank: options, refusals, several roles in a process, architectures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from fsdp_cases import trainer
from pydantic import ValidationError
from rlhf.errors import CapabilityError, CheckpointError, ConfigError, PluginVersionMismatch
from rlhf.interfaces.memory import TrainerWork
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf_cli.plan.model_size import read_size
from rlhf_plugin_fsdp.layers import decoder_layers, sparing_linear
from rlhf_plugin_fsdp.trainer import FsdpTrainer
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.image_models import tiny_image_model
from rlhf_testing.suite_losses import TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.image_batches import image_batch
from tests.support.losses import NllLoss
from tests.support.rank_batches import apart, batch, spec


def test_a_stand_in_for_an_older_torch_is_refused_when_the_trainer_is_chosen(tmp_path, monkeypatch):
    """Its FSDP reduces no gradients of parameters that a rank did not use."""
    (tmp_path / "torch-2.12.1+cu130.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1+cu130\n"
    (tmp_path / "torch-2.12.1+cu130.dist-info" / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins.discover()
    message = r"trainer 'fsdp' .* needs torch>=2\.13, found 2\.12\.1\+cu130\. Try: pip install 'torch>=2\.13'"
    with pytest.raises(PluginVersionMismatch, match=message):
        plugins.resolve("trainer", "fsdp")
    assert plugins.resolve("trainer", "torch").name == "torch"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    return folder


def test_policy_critic_and_reference_live_in_one_process(folder):
    policy, critic = trainer(spec(folder)), trainer(spec(folder, head="scalar"))
    reference = trainer(spec(folder, trained=False))
    reference_logprobs = reference.forward([batch(0)], ("logprobs",))[0]["logprobs"]
    for number in range(2):
        policy.update([batch(number)], TokenLoss(), {}, {})
        critic.update([batch(number, ValueLoss())], ValueLoss(), {}, {})
    assert torch.equal(reference.forward([batch(0)], ("logprobs",))[0]["logprobs"], reference_logprobs)
    for role, loss in ((policy, TokenLoss()), (critic, ValueLoss())):
        single = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu"), role.spec)
        for number in range(2):
            single.update([batch(number, loss)], loss, {}, {})
        assert apart(dict(role.weights()), dict(single.weights())) < 1e-5


def test_a_changed_learning_rate_holds_from_the_next_step(folder):
    policy, single = trainer(spec(folder)), TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu"), spec(folder))
    for instance in (policy, single):
        instance.update([batch(0)], TokenLoss(), {}, {})
        instance.change(instance.config.model_copy(update={"lr": 3e-3}))
        assert instance.update([batch(1)], TokenLoss(), {}, {})[1].lr == 3e-3
    assert apart(dict(policy.weights()), dict(single.weights())) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "liger"}, "kernels = 'liger' cannot be combined with trainer 'fsdp'"),
        ({"stage": 3}, "Extra inputs are not permitted"),
        ({"reshard_after_forward": "yes"}, "valid boolean"),
        ({"timeout": 0}, "greater than 0"),
        (
            {"lora": {"rank": 2, "quantization": "nf4"}},
            "lora.quantization cannot be combined with trainer 'fsdp', which divides",
        ),
        ({"quantization": "int8"}, "error, quantization cannot be combined with trainer 'fsdp', which divides"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        FsdpTrainer.Config(**options)


def test_a_model_without_layers_is_refused():
    from transformers import PreTrainedConfig, PreTrainedModel

    class Flat(PreTrainedModel):
        config_class = PreTrainedConfig

    model = Flat(PreTrainedConfig())
    model.only = nn.Linear(2, 2)
    with pytest.raises(CapabilityError, match="Flat declares no layers"):
        decoder_layers(model)


def test_the_layers_of_a_model(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert decoder_layers(model) == list(model.model.layers)
    model._no_split_modules = None
    assert decoder_layers(model) == list(model.model.layers)


def test_a_checkpoint_of_another_trainer_is_refused(folder, tmp_path):
    trainer(spec(folder)).save(tmp_path / "own")
    facts = json.loads((tmp_path / "own" / "trainer.json").read_text())
    (tmp_path / "own" / "trainer.json").write_text(json.dumps({**facts, "trainer": "deepspeed"}))
    with pytest.raises(CheckpointError, match="saved by trainer 'deepspeed'; this run has trainer 'fsdp'"):
        trainer(spec(folder)).load(tmp_path / "own")
    TorchTrainer(TorchTrainer.Config(device="cpu"), spec(folder)).save(tmp_path / "torch")
    with pytest.raises(CheckpointError, match="was not saved by trainer 'fsdp'"):
        trainer(spec(folder)).load(tmp_path / "torch")
    (tmp_path / "own" / "trainer.json").write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match="was saved with"):
        trainer(spec(folder), ema_decay=0.5).load(tmp_path / "own")


@pytest.mark.parametrize("kind", ["weight", "optimizer.exp_avg"])
def test_a_checkpoint_with_nan_is_refused(folder, tmp_path, kind):
    policy = trainer(spec(folder))
    policy.update([batch(0)], TokenLoss(), {}, {})
    policy.save(tmp_path)
    file = tmp_path / "rank-0-of-1.safetensors"
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    tensors = load_file(file)
    tensors[f"{kind}/model.norm.weight"][1] = float("nan")
    save_file(tensors, file, facts)
    with pytest.raises(CheckpointError, match=rf"{kind}/model.norm.weight: 1 of \d+ values are NaN or infinite"):
        trainer(spec(folder)).load(tmp_path)


def test_a_checkpoint_has_the_same_bytes_each_time(folder, tmp_path):
    policy = trainer(spec(folder))
    policy.update([batch(0)], TokenLoss(), {}, {})
    files = []
    for number in range(4):
        policy.save(tmp_path / str(number))
        files.append((tmp_path / str(number) / "rank-0-of-1.safetensors").read_bytes())
    assert len(set(files)) == 1


def test_planned_memory(folder):
    """Weights and AdamW's two moments over four ranks. Layers that stay whole take more while the rank computes."""
    size, model_spec = read_size(str(folder / "model")), replace(spec(folder), world_size=4)
    work = TrainerWork(32, 32, 8, micro_tokens=64, outputs=("logprobs",), annotated=())
    freed, resident = (
        FsdpTrainer.memory(FsdpTrainer.Config(reshard_after_forward=reshard), model_spec, size, work, "cuda").phases
        for reshard in (True, False)
    )
    assert freed["rest"].device["weights"] == size.parameters * 4 // 4
    assert freed["rest"].device["optimizer"] == size.parameters * 8 // 4
    layer_size, layers = size.layers[0].parameters, len(size.layers)
    difference = resident["forward"].device["working"] - freed["forward"].device["working"]
    root = size.parameters - layers * layer_size
    assert difference == 4 * ((root + layers * layer_size + layer_size) - max(2 * root, root + 2 * layer_size))


def test_linear_layers_under_autocast_keep_their_weight():
    """The gradients of torch's own function, bit for bit, without a saved bf16 copy of the weight."""

    def learn(sparing: bool) -> tuple[list[torch.Tensor], list[torch.dtype]]:
        torch.manual_seed(0)
        layer, x = nn.Linear(6, 5), torch.randn(2, 3, 6, requires_grad=True)
        saved: list[torch.dtype] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[0] in (5, 6) and tensor.ndim == 2 and tensor.shape != (6, 6):
                saved.append(tensor.dtype)
            return tensor

        with sparing_linear(sparing), torch.autocast("cpu", torch.bfloat16):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                y = layer(x)
            y.float().square().sum().backward()
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad], saved

    (want, dtypes), (result, sparing_dtypes) = learn(False), learn(True)
    assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
    assert [a.dtype for a in result] == [b.dtype for b in want]
    assert torch.bfloat16 in dtypes
    assert torch.float32 in sparing_dtypes
    assert torch.nn.functional.linear.__module__ == "torch._C._nn"


def test_steps_without_images_change_the_vision_tower_as_with_one_rank(tmp_path):
    """Its gradient is zero then. A step without gradient would leave out the momentum and the weight decay."""
    path = tiny_image_model(tmp_path)
    rows = image_batch(path, "qwen2_5_vl")
    pictures, text = (weigh(rows.select(units), NllLoss().reduce()) for units in ([0, 2], [1, 5]))
    model_spec, runs = replace(spec(path), path=str(path), images=True), []
    for cls in (TorchTrainer, FsdpTrainer):
        policy = cls(cls.Config(device="cpu", lr=1e-2, weight_decay=0.1), model_spec)
        states = [{name: t.clone() for name, t in policy.weights() if "visual" in name}]
        for batch_ in (text, pictures, text):
            policy.update([batch_], NllLoss(), {}, {})
            states.append({name: t.clone() for name, t in policy.weights() if "visual" in name})
        runs.append(states)
    for number, (first, second) in enumerate(zip(*runs, strict=True)):
        assert apart(first, second) < 1e-4
        assert number == 0 or apart(first, runs[0][number - 1]) > 5e-4


def test_image_text_models_whose_rows_would_be_divided_are_refused(tmp_path):
    model_spec = replace(spec(tmp_path, 0, 2, "1"), path=str(tiny_image_model(tmp_path / "model")))
    with pytest.raises(
        CapabilityError, match="sequence_parallel = 2 divides rows of text, but role 'policy' has an im"
    ):
        FsdpTrainer.check(FsdpTrainer.Config(sequence_parallel=2), model_spec, "cpu")
