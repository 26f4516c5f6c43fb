"""Layouts that OpenRLHF publishes, planned on paper: they fit, and half of their devices do not suffice.

Weights, gradients and master weights are in the precision of its flags (``--bf16``): 2 + 2 + 4 bytes beside AdamW's 8;
then as the trainer of this project holds them that divides a model (fp32 weights).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlhf.interfaces import GENERATOR, ModelSpec, Place
from rlhf.interfaces.memory import Footprint, Sharding
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec
from rlhf_plugin_plan import EngineLayout, Layout, Machine, RoleLayout, make_plan, parse, read_shape

GIB = 2**30


def zero3(ranks: int, *, offload: bool = False) -> Sharding:
    """ZeRO-3 in bf16 as DeepSpeed holds it. With the optimizer on the host gradients are there twice: as they come in
    bf16, and in fp32 for the step."""
    return Sharding(
        weight_ranks=ranks,
        gradient_ranks=ranks,
        optimizer_ranks=ranks,
        loading_ranks=ranks,
        weight_bytes=2.0,
        gradient_bytes=6.0 if offload else 2.0,
        master_bytes=4.0,
        keeps_gradients=True,
        host_optimizer=offload,
        offloads=True,
        gathered=10**9,
        bf16=True,
    )


def seventy_on(devices: int, published, *, offload: bool = True) -> Layout:
    """The performance tuning guide: of 48 GPUs 16 are for the engines, 16 for the actor and 16 for the critic, with
    ``--colocate_actor_ref`` and ``--colocate_critic_reward``. The rest is from train_ppo_llama_ray_70b.sh: ZeRO-3,
    ``--adam_offload``, ``--gradient_checkpointing``, ``--micro_train_batch_size 1``, 1024 + 1024 tokens."""
    each = devices // 3
    path = published("70B")
    lm, scalar = read_shape(path), read_shape(path, "scalar")
    common = {"micro_tokens": 2048, "longest": 2048, "gradient_checkpointing": True}
    trained, frozen = zero3(each, offload=offload), zero3(each)
    roles = (
        RoleLayout("policy", Place(each), lm, trained, True, **common),
        RoleLayout("reference", Place(each, share="policy"), lm, frozen, False, **common),
        RoleLayout("critic", Place(each), scalar, trained, True, outputs=("values",), **common),
        RoleLayout("reward", Place(each, share="critic"), scalar, frozen, False, rewards=True, **common),
    )
    footprint = Footprint(weight_bytes=2.0, tensor_parallel=4, share=0.9, sleeps=True)
    engines = EngineLayout(Place(each // 4, 4), lm, footprint, samples=256, longest=2048, bf16=True)
    return Layout(roles, engines, Machine("cuda", parse("80GiB", "memory"), parse("1TiB", "host"), 8, True))


def eight_on(devices: int, published) -> Layout:
    """The hybrid engine of train_ppo_llama_ray_hybrid_engine.sh: ``--colocate_all_models`` with 8 GPUs for each of the
    four roles, engines of ``--vllm_tensor_parallel_size 2``, ``--vllm_gpu_memory_utilization 0.5``, ZeRO-3, both sleep
    flags, ``--gradient_checkpointing``, packed micro-batches of 8 x 2048 tokens."""
    path = published("8B")
    lm, scalar = read_shape(path), read_shape(path, "scalar")
    common = {"sharding": zero3(devices), "micro_tokens": 8 * 2048, "longest": 2048, "gradient_checkpointing": True}
    on = Place(devices, share="policy")
    roles = (
        RoleLayout("policy", Place(devices), lm, trained=True, **common),
        RoleLayout("critic", on, scalar, trained=True, outputs=("values",), **common),
        RoleLayout("reference", on, lm, trained=False, **common),
        RoleLayout("reward", on, scalar, trained=False, rewards=True, **common),
    )
    footprint = Footprint(weight_bytes=2.0, tensor_parallel=2, share=0.5, sleeps=True)
    place = Place(devices // 2, 2, share="policy")
    engines = EngineLayout(place, lm, footprint, samples=256, longest=2048, bf16=True)
    return Layout(roles, engines, Machine("cuda", parse("80GiB", "memory"), None, 8, True))


def test_70b_fits_on_48_devices(published):
    layout = seventy_on(48, published)
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


def test_70b_needs_the_offload_there(published):
    plan = make_plan(seventy_on(48, published, offload=False))
    assert plan.fits is False
    assert "train" in {s.phase for s in plan.shortages} <= {"forward", "train"}
    assert any("70.6 G parameters x 12 bytes / 16 ranks" in line for s in plan.shortages for line in s.arithmetic)


def test_70b_does_not_fit_on_24_devices(published):
    """On the devices it would; a node of 1 TiB cannot hold what eight ranks of one role put there."""
    plan = make_plan(seventy_on(24, published))
    assert plan.fits is False
    assert {s.where for s in plan.shortages} == {"critic 0-7", "policy 0-7"}
    assert "8 devices of a node put 148 GiB each in host memory, 1.16 TiB of 1.00 TiB" in plan.shortages[0].message


def test_8b_fits_on_8_devices(published):
    layout = eight_on(8, published)
    plan = make_plan(layout)
    assert layout.devices == 8
    [group] = plan.groups
    assert group.group.count == 8
    assert dict(group.group.holds) == {"policy": 1, "critic": 1, "reference": 1, "reward": 1, GENERATOR: 1}
    assert plan.fits, [s.message for s in plan.shortages]
    generating, training = group.moments["generate"], group.moments["train"]
    assert "optimizer" not in generating.rows["policy"], "it is put aside while samples are drawn"
    assert generating.host == pytest.approx((8_030_261_248 + 7_504_928_768) * (12 + 2) / 8, rel=1e-6)
    assert set(training.rows[GENERATOR]) == {"process"}, "the engine sleeps"


def test_8b_does_not_fit_on_4_devices(published):
    plan = make_plan(eight_on(4, published))
    assert plan.fits is False
    assert {s.phase for s in plan.shortages} == {"train"}


def test_8b_does_not_fit_without_sleep(published):
    layout = eight_on(8, published)
    assert layout.engines is not None
    awake = replace(layout.engines, footprint=replace(layout.engines.footprint, sleeps=False))
    plan = make_plan(replace(layout, engines=awake))
    assert "train" in {s.phase for s in plan.shortages}


# ------------------------------------------------------------------------- as our own trainer holds them


def as_ours(layout: Layout, **options: object) -> Layout:
    """The layout with what ``deepspeed`` states of ZeRO-3; ``options`` are of roles that are trained."""
    pytest.importorskip("rlhf_plugin_deepspeed")
    trainer = Plugins.discover().resolve("trainer", "deepspeed").cls

    def held(role: RoleLayout) -> RoleLayout:
        head = "scalar" if role.shape.outputs == 1 else "lm"
        spec = ModelSpec(RoleSpec(role.name, head, role.trained), "", dtype="bf16", world_size=role.place.ranks)
        config = trainer.Config(stage=3, **(options if role.trained else {}))
        return replace(role, sharding=trainer.sharding(config, spec, "cuda"))

    return replace(layout, roles=tuple(map(held, layout.roles)))


def test_8b_fits_on_8_devices_as_we_hold_it(published):
    """Optimizer states are put aside before a sync wakes the engines, so they are not beside both weights."""
    plan = make_plan(as_ours(eight_on(8, published)))
    assert plan.fits, [s.message for s in plan.shortages]
    [group] = plan.groups
    peaks = {phase: round(moment.total / GIB, 1) for phase, moment in group.moments.items()}
    assert peaks == {"load": 65.9, "generate": 65.0, "sync": 60.2, "forward": 46.7, "train": 60.8}
    assert "optimizer" not in group.moments["sync"].rows["policy"]
    assert group.moments["sync"].host == group.moments["generate"].host > 0
    assert make_plan(as_ours(eight_on(4, published))).fits is False


def test_70b_fits_on_48_devices_as_we_hold_it(published):
    plan = make_plan(as_ours(seventy_on(48, published), offload_optimizer="cpu"))
    assert plan.fits, [s.message for s in plan.shortages]
    assert [round(group.peak.total / GIB, 1) for group in plan.groups] == [55.8, 50.7, 73.2]
