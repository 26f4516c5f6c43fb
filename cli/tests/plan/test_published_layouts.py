"""Layouts that OpenRLHF publishes: they fit, and half of their devices do not suffice.

The first tests use the precision of OpenRLHF's flags (``--bf16``): weights, gradients and master weights of 2 + 2 + 4
bytes, and 8 bytes for AdamW. The last tests use the fp32 weights of this project's trainer ``deepspeed``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from rlhf.interfaces import GENERATOR, ModelSpec, Place
from rlhf.interfaces.memory import ModelSize, SamplingWork, TrainerMemory, TrainerWork
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec
from rlhf_cli.plan.command import parse
from rlhf_cli.plan.layout import EngineLayout, Layout, Machine, RoleLayout
from rlhf_cli.plan.model_size import read_size
from rlhf_cli.plan.phases import make_plan
from rlhf_modeling.activations import Arithmetic
from rlhf_modeling.config import TrainingConfig
from rlhf_modeling.memory import trainer_memory
from rlhf_modeling.storage import Storage

GIB = 2**30


def zero3(ranks: int, *, offload: bool = False) -> Storage:
    """ZeRO-3 in bf16 as DeepSpeed holds it. With the optimizer on the host, gradients exist twice: in bf16, as they
    arrive, and in fp32 for the step."""
    return Storage(
        weight_ranks=ranks,
        gradient_ranks=ranks,
        optimizer_ranks=ranks,
        weight_bytes=2.0,
        gradient_bytes=6.0 if offload else 2.0,
        optimizer_bytes=12.0,
        keeps_gradients=True,
        host_optimizer=offload,
        offloads=True,
    )


Memory = Callable[[str, Place, ModelSize, TrainerWork], TrainerMemory]


def published_storage(offload: bool = False) -> Memory:
    def memory(name: str, place: Place, size: ModelSize, work: TrainerWork) -> TrainerMemory:
        trained = name in ("policy", "critic")
        stored = zero3(place.ranks, offload=offload and trained)
        stored = replace(stored, gathered=2 * min(size.parameters, 10**9 + size.widest))
        tokens = work.micro_tokens or 0
        a = Arithmetic(tokens, work.longest, device="cuda", bf16=True, checkpointing=True)
        return trainer_memory(stored, a, TrainingConfig(), ModelSpec(RoleSpec(name, "lm", trained), ""), size, work)

    return memory


def our_storage(stored: str = "fp32", **options: object) -> Memory:
    """As the trainer ``deepspeed`` states it for ZeRO-3; ``options`` are those of trained roles."""
    trainer = Plugins.discover().resolve("trainer", "deepspeed").cls

    def memory(name: str, place: Place, size: ModelSize, work: TrainerWork) -> TrainerMemory:
        trained = name in ("policy", "critic")
        role = RoleSpec(name, "scalar" if size.outputs == 1 else "lm", trained)
        spec = ModelSpec(role, "", dtype="bf16", gradient_checkpointing=True, world_size=place.ranks, storage=stored)
        config = trainer.Config(**{"stage": 3, **(options if trained else {})})
        return trainer.memory(config, spec, size, work, "cuda")

    return memory


def roles(places: Mapping[str, Place], path: str, tokens: int, memory: Memory) -> tuple[RoleLayout, ...]:
    """The four roles of PPO; the critic and the reward model have a scalar head."""
    layouts = []
    for name, place in places.items():
        scalar = name in ("critic", "reward")
        size = read_size(path, "scalar" if scalar else "lm")
        output = "values" if scalar else "logprobs"
        work = TrainerWork(2048, 2048, 10**6, micro_tokens=tokens, outputs=(output,), annotated=(output,))
        usage = memory(name, place, size, work)
        layouts.append(
            RoleLayout(name, place, size, usage, name in ("policy", "critic"), 2048, True, rewards=name == "reward")
        )
    return tuple(layouts)


def engines(place: Place, path: str, share: float, device: str = "80GiB") -> EngineLayout:
    """vLLM in bf16, as the generator ``vllm`` states it."""
    generator = Plugins.discover().resolve("generator", "vllm").cls
    config, size = generator.Config(tensor_parallel=place.devices, memory_share=share), read_size(path)
    usage = generator.memory(config, "bf16", size, SamplingWork(256, 256, 2048, 1024), "cuda", parse(device, "memory"))
    return EngineLayout(place, size, usage, 2048, place.devices)


def seventy_on(devices: int, published, memory: Memory) -> Layout:
    """The performance tuning guide: of 48 GPUs 16 are for the engines, 16 for the actor and 16 for the critic, with
    ``--colocate_actor_ref`` and ``--colocate_critic_reward``. The rest is from train_ppo_llama_ray_70b.sh: ZeRO-3,
    ``--adam_offload``, ``--gradient_checkpointing``, ``--micro_train_batch_size 1``, 1024 + 1024 tokens."""
    count, path = devices // 3, published("70B")
    places = {
        "policy": Place(count),
        "reference": Place(count, share="policy"),
        "critic": Place(count),
        "reward": Place(count, share="critic"),
    }
    machine = Machine("cuda", parse("80GiB", "memory"), parse("1TiB", "host"), 8, True)
    return Layout(roles(places, path, 2048, memory), engines(Place(count // 4, 4), path, 0.9), machine)


def eight_on(devices: int, published, memory: Memory, model: str = "8B", device: str = "80GiB") -> Layout:
    """The hybrid engine of train_ppo_llama_ray_hybrid_engine.sh: ``--colocate_all_models`` with 8 GPUs for each of the
    four roles, engines of ``--vllm_tensor_parallel_size 2``, ``--vllm_gpu_memory_utilization 0.5``, ZeRO-3, both sleep
    flags, ``--gradient_checkpointing``, packed micro-batches of 8 x 2048 tokens."""
    path, on = published(model), Place(devices, share="policy")
    places = {"policy": Place(devices), "critic": on, "reference": on, "reward": on}
    engine = engines(Place(devices // 2, 2, share="policy"), path, 0.5, device)
    machine = Machine("cuda", parse(device, "memory"), None, 8, True)
    return Layout(roles(places, path, 8 * 2048, memory), engine, machine)


def test_70b_fits_on_48_devices(published):
    layout = seventy_on(48, published, published_storage(offload=True))
    plan = make_plan(layout)
    assert layout.devices == 48
    assert [(g.group.title, g.group.count, dict(g.group.holds)) for g in plan.groups] == [
        ("policy 0-15", 16, {"policy": 1, "reference": 1}),
        ("critic 0-15", 16, {"critic": 1, "reward": 1}),
        ("generator 0-15", 16, {GENERATOR: 1}),
    ]
    assert plan.fits, [s.message for s in plan.shortages]
    policy = plan.groups[0].moments["train"]
    assert policy.rows["policy"]["weights"] == pytest.approx(70_553_706_496 * 2 / 16, abs=1)
    assert policy.host == pytest.approx(70_553_706_496 * (8 + 4 + 6) / 16, rel=1e-6)
    engine = plan.groups[2].moments["generate"].rows[GENERATOR]
    assert engine["weights"] + engine["cache"] == pytest.approx(0.9 * 80 * GIB, rel=1e-6)


def test_70b_needs_the_offload(published):
    plan = make_plan(seventy_on(48, published, published_storage()))
    assert plan.fits is False
    assert "train" in {s.phase for s in plan.shortages} <= {"forward", "train"}
    assert any("70.6 G parameters x 12 bytes / 16 ranks" in line for s in plan.shortages for line in s.arithmetic)


def test_70b_does_not_fit_on_24_devices(published):
    """It fits on the devices, but a host of 1 TiB cannot hold the offloaded state of eight ranks of one role."""
    plan = make_plan(seventy_on(24, published, published_storage(offload=True)))
    assert plan.fits is False
    assert {s.group for s in plan.shortages} == {"critic 0-7", "policy 0-7"}
    assert "8 devices of a node put 148 GiB each in host memory, 1.16 TiB of 1.00 TiB" in plan.shortages[0].message


def test_8b_fits_on_8_devices(published):
    layout = eight_on(8, published, published_storage())
    plan = make_plan(layout)
    assert layout.devices == 8
    [group] = plan.groups
    assert group.group.count == 8
    assert dict(group.group.holds) == {"policy": 1, "critic": 1, "reference": 1, "reward": 1, GENERATOR: 1}
    assert plan.fits, [s.message for s in plan.shortages]
    generating, training = group.moments["generate"], group.moments["train"]
    assert "optimizer" not in generating.rows["policy"], "it is offloaded while samples are generated"
    assert generating.host == pytest.approx((8_030_261_248 + 7_504_928_768) * (12 + 2) / 8, rel=1e-6)
    assert set(training.rows[GENERATOR]) == {"process"}, "the engine sleeps"


def test_7b_on_8_devices_of_40_gib_needs_the_offload(published):
    """In the hybrid engine's layout of 8B, which is published for devices of 80 GiB only."""
    plan = make_plan(eight_on(8, published, our_storage("bf16"), "7B", "40GiB"))
    assert {s.phase for s in plan.shortages} == {"train"}
    assert round(plan.groups[0].peak.total / GIB, 1) == 52.8
    plan = make_plan(eight_on(8, published, our_storage("bf16", offload_optimizer="cpu"), "7B", "40GiB"))
    assert plan.fits, [s.message for s in plan.shortages]
    assert round(plan.groups[0].peak.total / GIB, 1) == 34.3


@pytest.mark.parametrize(
    ("stored", "weights", "optimizer", "peaks"),
    [
        ("fp32", 4, 8, {"load": 26.0, "start": 59.7, "generate": 65.0, "sync": 60.2, "forward": 47.0, "train": 60.8}),
        ("bf16", 2, 12, {"load": 19.4, "start": 52.5, "generate": 56.4, "sync": 53.0, "forward": 47.7, "train": 61.0}),
    ],
)
def test_8b_fits_on_8_devices_with_our_weights(published, stored, weights, optimizer, peaks):
    """Optimizer states, and masters of bf16 weights, are offloaded before a sync wakes the engines, so they are not
    there together with both copies of the weights. Gathered weights are half as large in bf16."""
    plan = make_plan(eight_on(8, published, our_storage(stored)))
    assert plan.fits, [s.message for s in plan.shortages]
    [group] = plan.groups
    assert {phase: round(moment.total / GIB, 1) for phase, moment in group.moments.items()} == peaks
    training = group.moments["train"].rows["policy"]
    assert training["weights"] == pytest.approx(8_030_261_248 * weights / 8, rel=1e-6)
    assert training["optimizer"] == pytest.approx(8_030_261_248 * optimizer / 8, rel=1e-6)
    assert "optimizer" not in group.moments["sync"].rows["policy"]
    assert group.moments["sync"].host == group.moments["generate"].host > 0
    assert make_plan(eight_on(4, published, our_storage(stored))).fits is False


@pytest.mark.parametrize(("stored", "peaks"), [("fp32", [55.9, 50.7, 73.2]), ("bf16", [45.5, 42.6, 73.2])])
def test_70b_fits_on_48_devices_with_our_weights(published, stored, peaks):
    plan = make_plan(seventy_on(48, published, our_storage(stored, offload_optimizer="cpu")))
    assert plan.fits, [s.message for s in plan.shortages]
    assert [round(group.peak.total / GIB, 1) for group in plan.groups] == peaks
