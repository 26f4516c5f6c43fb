"""The memory of one rank by phase: at rest, while it computes, and on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rlhf.interfaces import ModelSpec, Trainer
from rlhf.interfaces.memory import TrainerWork
from rlhf.types import RoleSpec
from rlhf_cli.plan.model_size import read_size
from rlhf_cli.plan.phases import sum_of
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.adapters import train_adapters_only
from rlhf_modeling.arithmetic import arithmetic, saved_parameters
from rlhf_modeling.config import LoraOptions, TrainingConfig
from rlhf_modeling.memory import part_of, trainer_memory
from rlhf_modeling.model import load_model
from rlhf_modeling.storage import Storage, whole_storage
from rlhf_testing.tiny import tiny_model

WORK = TrainerWork(longest=64, unit=64, units=64, micro_tokens=512, annotated=("logprobs",))


@pytest.fixture(scope="module")
def size(tmp_path_factory):
    return read_size(str(tiny_model(tmp_path_factory.mktemp("m") / "model", hidden=64, layers=3)))


def memory(size, storage=None, trained=True, device="cuda", lora=None, quantization=None, **overrides):
    adapters = 0 if lora is None else lora.rank
    a = Arithmetic(**{"tokens": 512, "longest": 64, "device": device, "adapters": adapters} | overrides)
    config = TrainingConfig(lora=lora, quantization=quantization)
    spec = ModelSpec(RoleSpec("policy", "lm", trained), size.path)
    return trainer_memory(storage or Storage(), a, config, spec, size, WORK)


def state(size, storage, phase="rest"):
    usage = memory(size, storage).phases[phase].device
    return [usage.get(part, 0) for part in ("weights", "gradients", "optimizer")]


def test_each_zero_stage_divides_the_state(size):
    count = size.parameters
    first = Storage(optimizer_ranks=4)
    second = replace(first, gradient_ranks=4)
    third = replace(second, weight_ranks=4, keeps_gradients=True)
    assert state(size, Storage()) == [4 * count, 0, 8 * count]
    assert state(size, first) == [4 * count, 0, 2 * count]
    assert memory(size, second).phases["train"].device["gradients"] == count
    assert state(size, third) == [count, count, 2 * count]
    mixed = replace(third, weight_bytes=2.0, gradient_bytes=2.0, optimizer_bytes=16.0)
    assert state(size, mixed) == [count // 2, count // 2, 4 * count]


@pytest.mark.parametrize(
    ("storage", "part", "text"),
    [
        (Storage(), "weights", "x 4 bytes"),
        (Storage(), "optimizer", "x 8 bytes"),
        (Storage(optimizer_ranks=4), "optimizer", "x 8 bytes / 4 ranks"),
        (Storage(layer_ranks=2), "optimizer", "of layers in 2 parts x 8 bytes"),
        (Storage(layer_ranks=2, optimizer_ranks=4), "optimizer", "of layers in 2 parts x 8 bytes / 4 ranks"),
        (Storage(weight_ranks=8, second_ranks=2), "weights", "x 4 bytes / 8 ranks, plus a second copy over 2 ranks"),
    ],
)
def test_the_arithmetic_names_only_ranks_that_divide(size, storage, part, text):
    """One rank divides nothing, so there is no ``/ 1 ranks``."""
    assert memory(size, storage).arithmetic[part].endswith(f"M parameters {text}")


def test_a_frozen_role_holds_weights_only(size):
    usage = memory(size, trained=False)
    assert usage.phases["rest"].device == {"weights": 4 * size.parameters}
    assert "train" not in usage.phases
    assert usage.trained == 0


def test_a_second_copy_of_the_weights_is_beside_the_first(size):
    assert state(size, Storage(weight_ranks=8, second_ranks=2))[0] == int(4 * size.parameters * (1 / 8 + 1 / 2))


def test_an_optimizer_of_matrices_keeps_one_moment_and_needs_memory_in_its_step(size):
    muon = whole_storage(TrainingConfig(optimizer="muon"), "cuda", size)
    assert state(size, muon)[2] == 8 * size.parameters - 4 * size.matrices
    assert muon.step > 0
    large = replace(muon, step=10**9)
    assert memory(size, large).phases["train"].device["working"] == 10**9
    assert whole_storage(TrainingConfig(ema_decay=0.9), "cuda", size).optimizer_bytes == 12


def test_offloading_moves_the_optimizer_to_the_host(size):
    count = size.parameters
    sleeping = memory(size, Storage(offloads=True)).phases
    assert "optimizer" in sleeping["rest"].device
    assert "optimizer" not in sleeping["offloaded"].device
    assert sleeping["offloaded"].host == 8 * count
    on_host = memory(size, Storage(host_optimizer=True, host_weights=True)).phases
    assert on_host["rest"].device == {}
    assert on_host["rest"].host == 12 * count
    assert on_host["train"].host == 16 * count, "gradients are there too"


def test_making_buffers_takes_more_than_the_weights(size):
    count = size.parameters
    load = memory(size, Storage(making_bytes=4.0, buffers=1000)).phases["load"].device
    assert load == {"weights": 4 * count, "working": 4 * count + 1000}
    checked = memory(size, Storage(weight_ranks=4, gathered=10**6)).phases["load"].device
    assert checked == {"weights": count, "working": 10**6}, "a language model computes once, for its head to be checked"


def test_ranks_that_divide_layers_hold_a_part_and_read_the_whole(size):
    part = part_of(size, 2)
    assert 0.4 * size.parameters < part.parameters < size.parameters
    assert (part.layers[0].query, part.layers[0].ffn) == (size.layers[0].query // 2, size.layers[0].ffn // 2)
    divided = Storage(layer_ranks=2)
    assert memory(size, divided).phases["load"].device["weights"] == 4 * part.parameters
    assert memory(size, divided, device="cpu").phases["load"].device["weights"] == 4 * size.parameters


def test_adapters_need_little_memory_for_training(size):
    lora = memory(size, lora=LoraOptions(rank=4))
    assert lora.trained == size.adapter_parameters(4)
    assert lora.phases["rest"].device["optimizer"] == 8 * lora.trained
    assert lora.views == ("live", "base")
    assert sum_of(lora.phases["train"].device) < sum_of(memory(size).phases["train"].device)


def test_lengths_saved_modules_and_quantised_layers_are_counted(size, tmp_path):
    """The sums are those of the trainer's own tensors."""
    pytest.importorskip("peft")
    path, spec = size.path, ModelSpec(RoleSpec("policy", "lm", True), size.path, dtype="fp32")
    options = LoraOptions(rank=4, use_dora=True, modules_to_save=("embed_tokens",))
    config = TrainingConfig(lora=options)
    model = load_model(spec, torch.device("cpu"), options)
    train_adapters_only(model.module, None, options.modules_to_save)
    trainable = sum(p.numel() for p in model.module.parameters() if p.requires_grad)
    assert saved_parameters(config, spec) == model.module.get_input_embeddings().weight.numel()
    usage = memory(size, lora=options)
    assert usage.trained == trainable, path
    every = sum(p.numel() for p in model.module.parameters())
    assert usage.phases["rest"].device["weights"] == 4 * (every + trainable), "the first values are kept"
    linear = sum(p.numel() for n, p in model.module.named_parameters() if n.endswith("base_layer.weight"))
    quantised = memory(size, lora=options.model_copy(update={"quantization": "int8"}))
    assert usage.phases["rest"].device["weights"] - quantised.phases["rest"].device["weights"] == 3 * linear
    frozen = [
        memory(size, trained=False, quantization=kind).phases["rest"].device["weights"] for kind in (None, "int8")
    ]
    assert frozen[0] - frozen[1] == 3 * linear


def test_gradient_checkpointing_needs_less(size):
    plain, checkpointed, offloaded = (
        memory(size, checkpointing=c, offloads=o).phases["train"]
        for c, o in ((False, False), (True, False), (True, True))
    )
    assert offloaded.device["activations"] < checkpointed.device["activations"] < plain.device["activations"]
    assert offloaded.host - checkpointed.host == 3 * 512 * 64 * 4, "the input of each layer"


def test_offloaded_activations_are_in_host_memory_beside_a_gpu_only(size):
    config, spec = TrainingConfig(offload_activations=True), ModelSpec(RoleSpec("policy", "lm", True), size.path)
    spec = replace(spec, gradient_checkpointing=True, dtype="fp32")
    assert [arithmetic(config, spec, size, WORK, device).offloads for device in ("cpu", "cuda")] == [False, True]
    frozen = replace(spec, role=RoleSpec("reference", "lm", False))
    assert not arithmetic(config, frozen, size, WORK, "cuda").offloads


def test_gradients_of_a_single_micro_batch_are_made_when_its_activations_are_freed(size):
    """In a step of several they are there before the last one's activations."""
    freeing, gradients = Storage(frees_gradients=True), 4 * size.parameters
    single, multiple, as_before = (
        memory(size, storage, **options).phases["train"].device
        for storage, options in (
            (freeing, {"accumulated_tokens": 0}),
            (freeing, {"accumulated_tokens": 512}),
            (Storage(), {"accumulated_tokens": 0}),
        )
    )
    assert "gradients" not in single, "the head's is counted with its logits"
    assert multiple == as_before
    assert multiple["gradients"] == gradients
    short = memory(size, freeing, accumulated_tokens=64).phases["train"].device
    assert "gradients" not in short, "the single micro-batch needs more than several shorter ones"


def test_a_tied_head_has_three_whole_gradients_at_the_end_of_the_backward_pass(size):
    """Its own, that of the lookup, and their sum: all that is left where a step has few tokens."""
    few = memory(size, Storage(frees_gradients=True), tokens=2, longest=2, accumulated_tokens=0).phases["train"].device
    assert size.tied
    assert few["gradients"] == 4 * size.parameters
    assert few["working"] == 2 * 4 * size.embedding


def test_pages_of_freed_gradients_stay_beside_few_activations(size):
    """Those of the layers: the matrix of a head is given back. Logits take the place of none of them."""
    head, pieces = 50_000 * size.hidden, 4 * (size.parameters - size.head)
    wide = replace(size, outputs=50_000, vocabulary=50_000, head=head, embedding=head, parameters=pieces // 4 + head)
    plain, checkpointed = (
        memory(
            wide, Storage(frees_gradients=True), device="cpu", tokens=128, accumulated_tokens=0,
            checkpointing=checkpointing,
        ).phases["train"].device
        for checkpointing in (False, True)
    )  # fmt: skip

    def allowance(parts):
        temporary = sum(parts.get(part, 0) for part in ("gradients", "activations", "logits", "working"))
        return parts["allocator"] - 0.15 * (temporary + pieces)

    assert plain["activations"] > pieces > checkpointed["activations"]
    assert allowance(plain) == pytest.approx(0, abs=1)
    assert allowance(checkpointed) == pytest.approx(pieces - checkpointed["activations"], abs=1)


def test_a_cpu_process_keeps_its_freed_gradients(size):
    phases = memory(size, device="cpu").phases
    assert phases["rest"].device["allocator"] == 4 * size.parameters
    assert "allocator" not in memory(size).phases["rest"].device


def spec(**options):
    return ModelSpec(RoleSpec("policy", "lm", True), "", dtype="fp32", **options)


def test_the_micro_batch_is_bounded_by_the_budget_and_by_the_share_of_a_rank(size):
    config = TrainingConfig()

    def tokens(work, ranks=1, sharers=1, parts=1):
        return arithmetic(config, spec(world_size=ranks), size, work, "cpu", sharers, parts).tokens

    assert tokens(WORK) == 512
    assert tokens(replace(WORK, micro_tokens=None)) == 2048
    assert tokens(replace(WORK, micro_tokens=10)) == 64, "a sequence may be longer than the budget"
    assert tokens(replace(WORK, units=4)) == 4 * 64
    assert tokens(replace(WORK, units=4), ranks=4) == 64
    assert tokens(replace(WORK, units=4), ranks=4, sharers=2) == 2 * 64, "two ranks compute the same share"
    assert tokens(replace(WORK, units=4), ranks=4, parts=2) == 64, "two ranks divide the tokens of a share"
    assert tokens(replace(WORK, micro_tokens=10), ranks=2, parts=2) == 32, "and those of a long sequence"


def test_the_micro_batches_of_a_step_are_filled_evenly(size):
    """A step that one micro-batch holds has no second one."""
    config = TrainingConfig()

    def accumulated_tokens(work):
        return arithmetic(config, spec(), size, work, "cpu").accumulated_tokens

    assert accumulated_tokens(replace(WORK, units=8)) == 0, "512 tokens hold the step"
    assert accumulated_tokens(replace(WORK, units=9)) == 9 * 64 // 2 + 64, (
        "half of it, and one unit that cannot be divided"
    )
    assert accumulated_tokens(WORK) == 512, "never more than the budget"
    groups = replace(WORK, units=16, micro_tokens=500, prompt=32, siblings=4)
    assert accumulated_tokens(groups) == (4 * 32 + 16 * 32) // 2 + 32 + 4 * 32, "the answers of a prompt stay together"


def test_shared_prompts_repeat_keys_and_values(size):
    """A micro-batch of 2048 tokens holds a prompt of 512 and three answers of 512."""
    work = replace(WORK, longest=1024, unit=1024, micro_tokens=2048, prompt=512, siblings=8)
    assert arithmetic(TrainingConfig(), spec(), size, work, "cpu").repeats == 3 * 1024 / (512 + 3 * 512)
    assert arithmetic(TrainingConfig(shared_prefixes=False), spec(), size, work, "cpu").repeats == 1.0
    assert arithmetic(TrainingConfig(neftune_alpha=5.0), spec(), size, work, "cpu").repeats == 1.0


def test_frozen_roles_have_no_adapters(size):
    config = TrainingConfig(lora=LoraOptions(rank=4))
    assert arithmetic(config, spec(), size, WORK, "cpu").adapters == 4
    frozen = ModelSpec(RoleSpec("reference", "lm", False), "", dtype="fp32")
    assert arithmetic(config, frozen, size, WORK, "cpu").adapters == 0


def test_a_trainer_without_storage_facts_is_planned_as_a_whole_copy(size):
    usage = Trainer.memory(None, spec(), size, WORK, "cuda")
    count = size.parameters
    assert usage.phases["rest"].device == {"weights": 4 * count, "optimizer": 8 * count}
    assert usage.phases["train"].device["gradients"] == 4 * count
    reference = memory(size)
    assert sum_of(usage.phases["train"].device) == pytest.approx(sum_of(reference.phases["train"].device), rel=0.5)
    frozen = Trainer.memory(None, ModelSpec(RoleSpec("reference", "lm", False), ""), size, WORK, "cuda")
    assert "train" not in frozen.phases
