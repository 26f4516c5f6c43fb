"""One rank: several roles in a process, refusals, damaged checkpoints, exports of other architectures."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rlhf.errors import CapabilityError, CheckpointError, ConfigError, ModelError, TrainingError
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_cli.plan.model_size import read_size
from rlhf_modeling.config import LoraOptions
from rlhf_modeling.sharded.loading import load_on_host
from rlhf_modeling.sharded.process_group import _store
from rlhf_plugin_deepspeed.config import DeepSpeedTrainerConfig
from rlhf_plugin_deepspeed.parallel_layers import divide
from rlhf_plugin_deepspeed.topology import Topology
from rlhf_plugin_deepspeed.trainer import DeepSpeedTrainer, storage
from rlhf_plugin_local.trainer import TorchTrainer
from rlhf_testing.suite_losses import TokenLoss, ValueLoss
from rlhf_testing.tiny import tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteForCausalLM
from zero_cases import apart, batch, spec, trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    return folder


def test_policy_critic_and_reference_live_in_one_process(folder):
    policy, critic = trainer(spec(folder), stage=3), trainer(spec(folder, head="scalar"), stage=2)
    reference = trainer(spec(folder, trained=False), stage=3)
    reference_logprobs = reference.forward([batch(0)], ("logprobs",))[0]["logprobs"]
    torch.testing.assert_close(policy.forward([batch(0)], ("logprobs",))[0]["logprobs"], reference_logprobs)
    for number in range(2):
        policy.update([batch(number)], TokenLoss(), {}, {})
        critic.update([batch(number, ValueLoss())], ValueLoss(), {}, {})
    assert torch.equal(reference.forward([batch(0)], ("logprobs",))[0]["logprobs"], reference_logprobs)
    for role, loss in ((policy, TokenLoss()), (critic, ValueLoss())):
        single = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu"), role.spec)
        for number in range(2):
            single.update([batch(number, loss)], loss, {}, {})
        assert apart(dict(role.weights()), dict(single.weights())) < 1e-5
    assert torch.nn.functional.linear.__module__ == "torch._C._nn"  # DeepSpeed replaces it by its own function


def test_a_changed_learning_rate_holds_from_the_next_step_in_host_memory(folder):
    """As an observer changes it between two steps."""
    policy, unchanged = (trainer(spec(folder), stage=2, offload_optimizer="cpu") for _ in range(2))
    single = TorchTrainer(TorchTrainer.Config(lr=1e-3, device="cpu"), policy.spec)
    first_lr = policy.update([batch(0)], TokenLoss(), {}, {})[1].lr
    single.update([batch(0)], TokenLoss(), {}, {})
    unchanged.update([batch(0)], TokenLoss(), {}, {})
    for instance in (policy, single):
        instance.change(instance.config.model_copy(update={"lr": 3e-3}))
    for subject in (unchanged, single, policy):
        result = subject.update([batch(1)], TokenLoss(), {}, {})[1]
    assert (first_lr, result.lr) == (1e-3, 3e-3)
    assert apart(dict(policy.weights()), dict(single.weights())) < 1e-5
    assert apart(dict(policy.weights()), dict(unchanged.weights())) > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "Input should be 0, 1, 2 or 3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage 1, 2 or 3"),
        ({"stage": 2, "offload_params": "cpu"}, "offload_params = 'cpu' needs stage 3"),
        ({"stage": 3, "offload_params": "cpu"}, "offload_params = 'cpu' needs offload_optimizer = 'cpu'"),
        ({"stage": 2, "hpz_partition_size": 2}, "hpz_partition_size = 2 needs stage 3"),
        ({"stage": 2, "keep_whole": 5}, "keep_whole = 5 needs stage 3"),
        ({"stage": 0, "gathered": 5}, "gathered = 5 needs stage 3"),
        ({"muon_momentum": 0.9}, "muon_momentum = 0.9 has no effect with optimizer = 'adamw'"),
        ({"muon_lr": 0.1}, "muon_lr = 0.1 has no effect with optimizer = 'adamw'"),
    ],
)
def test_options_that_exclude_each_other_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        DeepSpeedTrainerConfig(**options)


def test_options_that_do_not_fit_a_role_are_refused(folder):
    with pytest.raises(CapabilityError, match=r"hpz_partition_size = 2 does not divide the 1 ranks of role 'policy'"):
        trainer(spec(folder), stage=3, hpz_partition_size=2)
    with pytest.raises(CapabilityError, match="has no view 'base': lora is not set"):
        next(trainer(spec(folder)).weights("base"))
    with pytest.raises(CapabilityError, match="has no view 'ema': ema_decay is not set"):
        trainer(spec(folder)).forward([batch(0)], ("logprobs",), "ema")


def test_wrong_ranks_and_a_missing_rendezvous_are_refused(folder):
    def build_spec(**facts):
        return ModelSpec(RoleSpec("policy", "lm", True), str(folder / "model"), "fp32", **facts)

    with pytest.raises(ConfigError, match=r"role 'policy', rank 2 of 2: a rank must be in 0\.\.1"):
        trainer(build_spec(rank=2, world_size=2))
    trainer(build_spec())  # from here on this process is in a group of one rank
    with pytest.raises(CapabilityError, match="rank 0 of 2: this process is already a rank of a group of 1"):
        trainer(build_spec(world_size=2, rendezvous="tcp://127.0.0.1:1"))


def test_rank_0_listens_at_the_rendezvous_address_only(folder):
    """/proc/net must list 127.0.0.1 only, so that other machines cannot join."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    model_spec = ModelSpec(RoleSpec("policy"), str(folder), world_size=1, rendezvous=f"tcp://127.0.0.1:{port}")
    store = _store(model_spec, timedelta(seconds=10))
    store.set("there", "yes")
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    listens = [
        row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    ]
    assert listens == ["0100007F"]


def test_gradients_that_were_read_must_be_applied_before_the_next_micro_batch(folder):
    policy = trainer(spec(folder), stage=1)
    policy.accumulate([batch(0)], TokenLoss(), {}, {})
    policy.gradients()
    with pytest.raises(TrainingError, match=r"gradients were read: apply\(\) or zero_grad\(\) must come"):
        policy.accumulate([batch(1)], TokenLoss(), {}, {})
    policy.zero_grad()
    assert policy.apply().grad_norm == 0.0  # a step without gradients changes nothing
    assert policy.updates == 1


def test_offload_and_reload_work_with_weights_in_host_memory(folder):
    """A hybrid engine makes these calls between two phases. With all state in host memory only buffers are moved."""
    options = {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}
    policy, twin = trainer(spec(folder), **options), trainer(spec(folder), **options)
    for number in range(3):
        assert policy.update([batch(number)], TokenLoss(), {}, {}) == twin.update([batch(number)], TokenLoss(), {}, {})
        policy.offload()
        scores = [instance.forward([batch(5)], ("logprobs",))[0]["logprobs"] for instance in (policy, twin)]
        assert torch.equal(*scores)
        policy.reload()


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"optimizer": "muon", "stage": 3}], ids=str)
def test_gradients_in_host_memory_that_gpus_would_exchange_are_refused(folder, options):
    two, option = replace(spec(folder), world_size=2), next(iter(options))
    config = DeepSpeedTrainerConfig(offload_optimizer="cpu", **options)
    with pytest.raises(CapabilityError, match=rf"{option} = \S+ exchanges them between its 2 ranks, and NCCL"):
        DeepSpeedTrainer.check(config, two, "cuda")
    DeepSpeedTrainer.check(config, two, "cpu")
    DeepSpeedTrainer.check(config.model_copy(update={"offload_optimizer": "none"}), two, "cuda")


def test_layers_with_adapters_that_are_not_fused_can_be_divided(folder):
    """One part, so the divided model must compute what the whole one did, which ``divide`` compares."""
    trainer(spec(folder))  # this process joins a group of one rank
    model = load_on_host(spec(folder), torch.device("cpu"), LoraOptions(rank=2), "none")
    for name, parameter in model.module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    split = divide(model, Topology(spec(folder), 1, 60.0), torch.device("cpu"))
    assert split.dims["model.layers.0.self_attn.q_proj.lora_B.default.weight"] == 0


def test_zero_grad_discards_gradients_in_every_stage(folder):
    for stage in (1, 2, 3):
        policy = trainer(spec(folder), stage=stage)
        policy.update([batch(0)], TokenLoss(), {}, {})
        policy.accumulate([batch(1)], TokenLoss(), {}, {})
        policy.zero_grad()
        assert not any(g.any() for g in policy.gradients().values())


def test_coverage_names_parameters_without_a_gradient(tmp_path):
    path = tiny_model(tmp_path / "model", std=0.2, tied=False)
    for stage in (0, 2, 3):
        policy = trainer(ModelSpec(RoleSpec("policy", "lm", True), str(path), "fp32"), stage=stage, lr=0.0)
        assert policy.coverage() == {}
        with torch.no_grad():  # the gradient through a head of zeros is zero
            head = next(n for n in policy.tensors.shapes if n.startswith("lm_head"))
            zeros = {n: torch.zeros(s) if n == head else torch.randn(s) for n, s in policy.tensors.shapes.items()}
        policy.load_weights(iter(zeros.items()))
        policy.update([batch(0)], TokenLoss(), {}, {})
        assert policy.coverage() == {
            "without_gradient": [n for n in policy.parameters if n != head],
            "unchanged": list(policy.parameters),
        }


def test_load_weights_of_another_model_changes_nothing(folder):
    policy = trainer(spec(folder), stage=3)
    weights = dict(policy.weights())
    with pytest.raises(
        CheckpointError, match=r"the weight stream for role 'policy' is of another model: missing \['model.norm"
    ):
        policy.load_weights((n, t * 2) for n, t in weights.items() if n != "model.norm.weight")
    with pytest.raises(CheckpointError, match=r"'model.norm.weight' has shape \(3,\), expected \(32,\)"):
        policy.load_weights((n, t[:3] if n == "model.norm.weight" else t * 2) for n, t in weights.items())
    assert all(torch.equal(weights[n], t) for n, t in policy.weights())


@pytest.fixture
def saved(folder, tmp_path):
    policy = trainer(spec(folder), stage=2)
    policy.update([batch(0)], TokenLoss(), {}, {})
    policy.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_damaged_checkpoints_are_refused(folder, saved):
    policy, file = trainer(spec(folder), stage=3), saved / "rank-0-of-1.safetensors"
    facts, content = (saved / "trainer.json").read_text(), file.read_bytes()

    def refused(message):
        with pytest.raises(CheckpointError, match=message):
            policy.load(saved)

    file.write_bytes(content[: len(content) // 2])
    refused(r"cannot read '.*rank-0-of-1.safetensors'.*all their files must be present and complete")
    file.unlink()
    refused(r"cannot read '.*rank-0-of-1.safetensors'")
    file.write_bytes(content)
    (saved / "trainer.json").unlink()  # written last: a save that was interrupted
    refused("cannot read trainer.json")
    (saved / "trainer.json").write_text(facts.replace('"ranks": 1', '"ranks": 2'))
    refused(r"cannot read '.*rank-0-of-2.safetensors'.*saved by 2 ranks")
    (saved / "trainer.json").write_text(json.dumps({k: v for k, v in json.loads(facts).items() if k != "ranks"}))
    refused("was not saved by trainer 'deepspeed'")
    (saved / "trainer.json").write_text(facts)
    policy.load(saved)


def test_checkpoints_of_another_run_are_refused(folder, saved):
    with pytest.raises(ConfigError, match=r"was saved with .*'optimizer': 'adamw'.*this run has .*'muon'"):
        trainer(spec(folder), optimizer="muon").load(saved)
    with pytest.raises(ConfigError, match=r"'ema': False.*'ema': True"):
        trainer(spec(folder), ema_decay=0.5).load(saved)
    with pytest.raises(CheckpointError, match="is of another model: missing"):
        trainer(spec(folder, head="scalar")).load(saved)


@pytest.mark.full
def test_checkpoints_before_the_first_step_and_of_muon_can_be_resumed(folder, tmp_path):
    for optimizer in ("adamw", "muon"):
        for steps in (0, 2):
            policy = trainer(spec(folder), stage=2, optimizer=optimizer)
            for number in range(steps):
                policy.update([batch(number)], TokenLoss(), {}, {})
            policy.save(tmp_path / f"{optimizer}-{steps}")
            other = trainer(spec(folder), stage=3, optimizer=optimizer)
            other.update([batch(8)], TokenLoss(), {}, {})
            other.load(tmp_path / f"{optimizer}-{steps}")
            losses = [instance.update([batch(5)], TokenLoss(), {}, {})[0]["loss"][0] for instance in (policy, other)]
            assert losses[0] == pytest.approx(losses[1], abs=1e-6)
            assert apart(dict(other.weights()), dict(policy.weights())) < 1e-4


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters(folder, tmp_path, stage):
    """Only adapters are trained and saved. Weights and exports are merged. The view `base` is the untrained model."""
    policy = trainer(spec(folder), stage=stage, lora={"rank": 4}, lr=1e-2)
    base = dict(trainer(spec(folder)).weights())
    for number in range(3):
        policy.update([batch(number)], TokenLoss(), {}, {})
    assert policy.views == ("live", "base")
    assert all("lora_" in name for name in policy.parameters)
    assert all(torch.equal(base[n], t) for n, t in policy.weights("base"))
    merged = trainer(spec(folder), stage=stage)
    merged.load_weights(policy.weights())
    scores = [instance.forward([batch(9)], ("logprobs",))[0]["logprobs"] for instance in (policy, merged)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)
    base_logprobs = trainer(spec(folder, trained=False)).forward([batch(9)], ("logprobs",))[0]["logprobs"]
    torch.testing.assert_close(
        policy.forward([batch(9)], ("logprobs",), "base")[0]["logprobs"], base_logprobs, atol=1e-5, rtol=0
    )
    assert (scores[0] - base_logprobs).abs().max() > 0.01
    policy.export(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(exported[n], t) for n, t in policy.weights())
    policy.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "rank-0-of-1.safetensors").stat().st_size < 100_000
    restart = trainer(spec(folder), stage=4 - stage, lora={"rank": 4}, lr=1e-2)
    restart.load(tmp_path / "saved")
    losses = [instance.update([batch(5)], TokenLoss(), {}, {})[0]["loss"][0] for instance in (policy, restart)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    with pytest.raises(ConfigError, match=r"'lora': \{.*'lora': None"):
        trainer(spec(folder)).load(tmp_path / "saved")
    with pytest.raises(TrainingError, match="role 'policy' trains adapters; its weights cannot be replaced"):
        policy.load_weights(iter(base.items()))


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_quantised_layers_below_adapters(folder, tmp_path, stage):
    """The numbers of the trainer `torch`, whose exports have the same weights."""
    pytest.importorskip("bitsandbytes")
    options = {"lora": {"rank": 4, "use_dora": True, "quantization": "nf4", "modules_to_save": ("embed_tokens",)}}
    policy = trainer(spec(folder), stage=stage, lr=1e-2, **options)
    other = TorchTrainer(TorchTrainer.Config(device="cpu", lr=1e-2, **options), spec(folder))
    base = dict(other.weights("base"))
    for number in range(2):
        for instance in (policy, other):
            instance.update([batch(number)], TokenLoss(), {}, {})
    assert apart(dict(policy.weights()), dict(other.weights())) < 1e-4
    assert all(torch.equal(base[n], t) for n, t in policy.weights("base"))
    scores = [instance.forward([batch(9)], ("logprobs",))[0]["logprobs"] for instance in (policy, other)]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=0)
    policy.export(tmp_path)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(exported[n], t) for n, t in policy.weights())


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 2])
def test_quantised_layers_of_a_frozen_role(folder, stage):
    """The numbers of the trainer `torch`."""
    pytest.importorskip("bitsandbytes")
    frozen = spec(folder, trained=False)
    quantized, plain = trainer(frozen, stage=stage, quantization="nf4"), trainer(frozen, stage=stage)
    other = TorchTrainer(TorchTrainer.Config(device="cpu", quantization="nf4"), frozen)
    scores = [instance.forward([batch(9)], ("logprobs",))[0]["logprobs"] for instance in (quantized, other, plain)]
    torch.testing.assert_close(*scores[:2], atol=1e-5, rtol=0)
    assert (scores[0] - scores[2]).abs().max() > 1e-3


def test_export_of_experts_has_the_names_of_published_checkpoints(tmp_path):
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "tied": False}
    path = tiny_model(tmp_path / "model", architecture="qwen3_moe", **options)
    want = load_file(path / "model.safetensors")
    for stage, limit in ((2, 2**32), (3, 20_000)):
        policy = trainer(ModelSpec(RoleSpec("policy"), str(path), "fp32"), stage=stage, export_shard_bytes=limit)
        policy.export(tmp_path / str(stage))
        files = sorted((tmp_path / str(stage)).glob("*.safetensors"))
        assert len(files) > 1 or stage == 2
        tensors = {n: t for file in files for n, t in load_file(file).items()}
        assert tensors.keys() == want.keys()
        assert all(torch.equal(tensors[n], t) for n, t in want.items())
        assert dict(policy.weights()).keys() == want.keys(), "the tensors that generators get"


QUIET = """
import sys
sys.path.insert(0, {tests!r})
from rlhf.plugins import Plugins
assert "deepspeed" not in sys.modules
cls = Plugins.discover().resolve("trainer", "deepspeed").cls
from pathlib import Path
from zero_cases import *
from rlhf_testing.suite_losses import TokenLoss
for stage in (2, 3):
    one = trainer(spec(Path({folder!r})), stage=stage, optimizer="muon")
    one.update([batch(0)], TokenLoss(), {{}}, {{}})
"""


@pytest.mark.full
def test_deepspeed_prints_nothing(folder):
    code = QUIET.format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


EXPORT = """
import sys
from rlhf.interfaces import ModelSpec
from rlhf.types import RoleSpec
from rlhf_plugin_local.trainer import TorchTrainer
of = ModelSpec(RoleSpec("policy"), {path!r}, "fp32")
TorchTrainer(TorchTrainer.Config(device="cpu"), of).export({out!r})
assert "deepspeed" not in sys.modules, "transformers imports it where it saves a module in an unknown wrapper"
"""


@pytest.mark.full
def test_an_export_of_another_trainer_neither_imports_deepspeed_nor_prints(folder, tmp_path):
    code = EXPORT.format(path=str(folder / "model"), out=str(tmp_path))
    env = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_missing_or_broken_deepspeed_is_an_error(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match=r"needs the package deepspeed.*pip install deepspeed"):
        trainer(spec(folder))


@pytest.mark.parametrize("stage", [2, 3])
def test_models_that_lack_weights_are_refused(tmp_path, stage):
    path = tiny_model(tmp_path / "model", tied=False)
    weights = load_file(path / "model.safetensors")
    model_spec = ModelSpec(RoleSpec("policy", "lm", True), str(path), "fp32")
    save_file(
        {n: t for n, t in weights.items() if n != "model.norm.weight"}, path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"lacks 1 weights of a Qwen3ForCausalLM .*'model.norm.weight'"):
        trainer(model_spec, stage=stage)
    wrong = weights | {"lm_head.weight": weights["lm_head.weight"][:5].clone()}
    save_file(wrong, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="cannot load the model"):
        trainer(model_spec, stage=stage)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    trainer(model_spec, stage=stage)


def test_a_fresh_scalar_head_is_the_same_in_every_stage(folder):
    """The role is a critic that starts from a language model."""
    model_spec = ModelSpec(RoleSpec("critic", "scalar", True), str(folder / "model"), "fp32", seed=5)
    heads = [dict(trainer(model_spec, stage=stage).weights())["score.weight"] for stage in (0, 3)]
    torch.testing.assert_close(heads[0], heads[1], rtol=0, atol=0)
    assert torch.equal(
        heads[0], dict(TorchTrainer(TorchTrainer.Config(device="cpu"), model_spec).weights())["score.weight"]
    )


def test_a_scaled_head_is_scaled_and_any_other_refused_in_every_stage(tmp_path, monkeypatch):
    path = tiny_model(tmp_path / "model", architecture="granite", logits_scaling=8.0)
    for stage in (2, 3):
        assert (
            trainer(ModelSpec(RoleSpec("policy", "lm", True), str(path), "fp32"), stage=stage).loaded_model.logit_scale
            == 1 / 8
        )
    forward = GraniteForCausalLM.forward

    def squaring(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.logits = out.logits.square()
        return out

    monkeypatch.setattr(GraniteForCausalLM, "forward", squaring)
    for stage in (2, 3):
        with pytest.raises(ModelError, match="does more to its logits than a linear head"):
            trainer(ModelSpec(RoleSpec("policy", "lm", True), str(path), "fp32"), stage=stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_exported_average_of_a_process_reward_model(folder, tmp_path, stage):
    """The bias of its head is written after the last weight, when the live weights are back in the model."""
    model_spec = replace(spec(folder), role=RoleSpec("policy", "classes:2", True))
    policy = trainer(model_spec, stage=stage, ema_decay=0.5)
    policy.update([batch(0, ValueLoss())], ValueLoss(), {}, {})
    average = {name: values.clone() for name, values in policy.weights("ema")}
    assert apart(dict(policy.weights()), average) > 1e-4
    policy.export(tmp_path / "model", "ema")
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == {*average, "score.bias"}
    assert all(torch.equal(exported[name], values) for name, values in average.items())


def test_the_planned_storage_is_what_a_rank_holds(folder):
    """Compares the figures for ``rlhf plan`` with the tensors that exist between steps."""
    for stage, options in ((0, {}), (2, {}), (3, {"ema_decay": 0.5}), (3, {"offload_optimizer": "cpu"})):
        policy = trainer(spec(folder), stage=stage, **options)
        policy.update([batch(0)], TokenLoss(), {}, {})
        plan = storage(policy.config, policy.spec, read_size(policy.spec.path), "cpu")
        parameters = sum(s.numel() for s in policy.tensors.shapes.values())
        moments = sum(v.nbytes for s in policy.base.state.values() for v in s.values() if v.numel() > 1)
        average = 4.0 if policy.average is not None else 0.0
        stepped = {f.owner.untyped_storage().data_ptr() for f in policy.partition.flats}
        if stage == 3:
            optimizer = policy.zero.optimizer
            computed = {g.untyped_storage().data_ptr() for g in optimizer.fp16_partitioned_groups_flat}
            assert optimizer.grad_partitions_flat_buffer.nbytes / parameters == pytest.approx(4.0, rel=0.01)
        else:
            computed = {p.untyped_storage().data_ptr() for p in policy.parameters.values()}
        master = 0.0 if stepped <= computed else 4.0
        assert moments / parameters + average + master == pytest.approx(plan.optimizer_bytes, rel=0.01)
    assert not plan.host_optimizer, "on a CPU the host's memory is the device's"
    two = storage(DeepSpeedTrainerConfig(stage=3), spec(folder, 0, 2, "1"), read_size(str(folder / "model")), "cuda")
    assert (two.weight_ranks, two.gradient_ranks, two.optimizer_ranks) == (2, 2, 2)
    assert (two.offloads, two.second_ranks, two.making_bytes) == (True, 0, 2.0)
    node = DeepSpeedTrainerConfig(stage=3, hpz_partition_size=2, offload_optimizer="cpu", offload_params="cpu")
    four = storage(node, spec(folder, 0, 4, "1"), read_size(str(folder / "model")), "cuda")
    assert (four.second_ranks, four.host_optimizer, four.host_weights) == (2, True, True)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_planned_storage_of_muon_is_what_a_rank_holds(folder, stage):
    """One momentum for the layers' matrices, two moments for everything else."""
    policy = trainer(spec(folder), stage=stage, optimizer="muon")
    policy.update([batch(0)], TokenLoss(), {}, {})
    size = read_size(policy.spec.path)
    plan = storage(policy.config, policy.spec, size, "cpu")
    moments = sum(v.nbytes for s in policy.base.state.values() for v in s.values() if v.numel() > 1)
    planned = size.parameters * plan.optimizer_bytes - size.matrices * plan.matrix_saving
    assert moments == pytest.approx(planned, rel=0.01)
    assert plan.matrix_saving == 4.0
    assert plan.step > 4 * size.matrices


TAKES_NOTHING_ALONG = """
import sys
import torch
from rlhf_plugin_deepspeed.process_group import import_deepspeed

import_deepspeed(torch.device("cpu"))
assert "mlflow" not in sys.modules
import mlflow
assert mlflow.__version__
"""


@pytest.mark.full
def test_deepspeed_does_not_import_mlflow(tmp_path):
    """DeepSpeed's autotuner would import mlflow. A later import of mlflow must work."""
    pytest.importorskip("mlflow")
    done = subprocess.run(
        [sys.executable, "-c", TAKES_NOTHING_ALONG], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
