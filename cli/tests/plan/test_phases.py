"""Memory of a device in each phase: roles at rest, roles that compute, and engines that sleep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.memory import EngineMemory, PhaseMemory, TrainerMemory
from rlhf_cli.plan.layout import EngineLayout, Layout, Machine, RoleLayout
from rlhf_cli.plan.model_size import read_size
from rlhf_cli.plan.phases import PROCESS_BYTES, TOKENIZER_BYTES, make_plan, occupied
from rlhf_testing.tiny import tiny_model

GIB = 2**30
GPU = Machine("cuda", 8 * GIB, None, 8, processes=True)
CPU = Machine("cpu", 8 * GIB)
TRAINED = TrainerMemory(
    {
        "load": PhaseMemory({"weights": 100, "working": 5}),
        "rest": PhaseMemory({"weights": 100, "optimizer": 200, "working": 1}),
        "offloaded": PhaseMemory({"weights": 100}, 200),
        "forward": PhaseMemory({"weights": 100, "optimizer": 200, "working": 30}),
        "train": PhaseMemory({"weights": 100, "optimizer": 200, "gradients": 50, "activations": 70}),
    },
    micro_tokens=512,
    trained=25,
    copies=True,
    arithmetic={"weights": "25 parameters x 4 bytes"},
)
FROZEN = TrainerMemory(
    {
        phase: PhaseMemory({"weights": 100, "working": 9 * (phase == "forward")})
        for phase in ("load", "rest", "offloaded", "forward")
    },
    micro_tokens=512,
)
AWAKE = PhaseMemory({"weights": 40, "cache": 400})
ENGINE = EngineMemory(
    {"rest": AWAKE, "asleep": PhaseMemory({}), "generate": AWAKE}, sleeps=True, cache_token=2.0, cache=400,
    arithmetic={"cache": "what 0.5 of the device leaves"},
)  # fmt: skip


@pytest.fixture(scope="module")
def size(tmp_path_factory):
    return read_size(str(tiny_model(tmp_path_factory.mktemp("m") / "model", hidden=64, layers=3)))


def policy(size, place=Place(), **options) -> RoleLayout:  # noqa: B008 - frozen
    return RoleLayout(
        "policy", place, size, options.pop("memory", TRAINED), options.pop("trained", True), 64, **options
    )


def frozen(size, name="reference", **options) -> RoleLayout:
    return replace(policy(size, memory=FROZEN, trained=False, **options), name=name)


def engines(size, place=Place(share="policy"), **options) -> EngineLayout:  # noqa: B008 - frozen
    return EngineLayout(place, size, replace(ENGINE, **options.pop("memory", {})), 64, bucket=7, **options)


def only(layout: Layout):
    [group] = make_plan(layout).groups
    return group.moments


def test_a_role_alone(size):
    moments = only(Layout((policy(size),), None, CPU))
    assert list(moments) == ["load", "forward", "train"]
    assert moments["load"].rows["policy"] == {"weights": 100, "working": 5}
    assert moments["train"].rows["policy"] == TRAINED.phases["train"].device
    process = PROCESS_BYTES["cpu"] + TOKENIZER_BYTES * size.vocabulary
    assert moments["train"].rows["process"] == {"process": process}
    assert moments["train"].total == 420 + process


def test_states_of_the_optimizer_come_with_the_first_step(size):
    moments = only(Layout((policy(size), frozen(size)), None, CPU))
    assert "optimizer" not in moments["load"].rows["policy"]
    assert "optimizer" in moments["forward"].rows["policy"]


def test_one_trains_while_the_other_rests(size):
    larger = replace(TRAINED, phases={**TRAINED.phases, "train": PhaseMemory({"weights": 100, "activations": 900})})
    moments = only(Layout((policy(size), replace(policy(size, memory=larger), name="critic")), None, CPU))
    assert moments["train"].busy == ("critic",), "the fullest moment"
    assert moments["train"].rows["policy"] == TRAINED.phases["rest"].device


@pytest.mark.parametrize(("gradients", "allocator"), [(50, 10), (90, None)])
def test_in_one_process_gradients_that_a_role_freed_become_those_of_another(size, gradients, allocator):
    """Only the larger of the two roles at rest counts, and of it what the third does not use."""
    at_rest = {
        freed: {**TRAINED.phases, "rest": PhaseMemory({"weights": 100, "allocator": freed})} for freed in (40, 60)
    }
    roles = [
        replace(policy(size, memory=replace(TRAINED, phases=phases)), name=f"critic {freed}")
        for freed, phases in at_rest.items()
    ]
    busy = {**TRAINED.phases, "train": PhaseMemory({"weights": 100, "optimizer": 900, "gradients": gradients})}
    layout = Layout((policy(size, memory=replace(TRAINED, phases=busy)), *roles), None, CPU)
    rows = only(layout)["train"].rows
    assert [rows[role.name].get("allocator") for role in roles] == [None, allocator]
    process_rows = only(replace(layout, machine=replace(CPU, processes=True)))["train"].rows
    assert [process_rows[role.name]["allocator"] for role in roles] == [40, 60]


def test_a_precomputed_role_is_removed_before_the_others_are_loaded(size):
    moments = only(Layout((policy(size, annotates=False), frozen(size, precomputed=True)), None, CPU))
    assert list(moments) == ["precompute", "load", "train"]
    assert set(moments["precompute"].rows) == {"reference", "process"}
    assert moments["precompute"].rows["reference"] == {"weights": 100, "working": 9}
    assert all("reference" not in moments[phase].rows for phase in ("load", "train"))


def test_engine_and_trainer_take_turns_on_shared_devices(size):
    moments = only(Layout((policy(size),), engines(size), GPU))
    assert moments["generate"].rows["policy"] == {"weights": 100, "process": PROCESS_BYTES["cuda"]}
    assert moments["generate"].host == moments["sync"].host == 200
    assert "optimizer" not in moments["sync"].rows["policy"], "it is offloaded before the sync wakes the engine"
    assert moments["sync"].rows["policy"]["working"] == 7, "a bucket of copied weights"
    assert moments["sync"].rows[GENERATOR]["working"] == 7
    mapped = only(Layout((policy(size),), replace(engines(size), mapped=True), GPU))["sync"]
    assert mapped.rows["policy"]["working"] == 7 + 2 * 7, "and the two buffers that the engine maps"
    separate = replace(engines(size, Place(1)), mapped=True)
    assert (
        make_plan(Layout((policy(size),), separate, GPU)).groups[0].moments["sync"].rows["policy"]["working"] == 7 + 1
    )
    assert moments["train"].host == 0
    assert set(moments["train"].rows[GENERATOR]) == {"process"}, "the engine sleeps"
    assert moments["sync"].rows[GENERATOR]["cache"], "canaries are scored after a sync"
    quiet = replace(engines(size), canaries=False)
    assert "cache" not in only(Layout((policy(size),), quiet, GPU))["sync"].rows[GENERATOR]


def test_an_engine_starts_beside_the_models_that_were_loaded_before(size):
    layout = Layout((policy(size),), engines(size), GPU)
    moments, process = only(layout), PROCESS_BYTES["cuda"]
    assert GENERATOR not in moments["load"].busy
    assert moments["load"].rows[GENERATOR] == {"process": process}, "it starts after the load"
    assert moments["start"].rows["policy"] == {"weights": 100, "working": 1, "process": process}
    assert moments["start"].rows[GENERATOR] == {"weights": 40, "cache": 400, "process": process}
    assert occupied(layout) == 100 + 1 + 2 * process
    single_process = replace(layout, machine=replace(GPU, processes=False))
    assert occupied(single_process) == 100 + 1 + process, "one process"
    for other in (replace(layout, machine=CPU), replace(layout, engines=engines(size, Place(1)))):
        assert all("start" not in group.moments for group in make_plan(other).groups)


def test_an_engine_that_does_not_fit_at_its_start_is_a_shortage(size):
    """Later phases may need less: the engine sleeps while the policy computes, and its states are on the host."""
    phases = {**TRAINED.phases, "rest": PhaseMemory({"weights": 4 * GIB}), "offloaded": PhaseMemory({"weights": GIB})}
    weights = PhaseMemory({"weights": 3 * GIB})
    memory = {"phases": {"rest": weights, "asleep": PhaseMemory({}), "generate": weights}}
    plan = make_plan(Layout((policy(size, memory=replace(TRAINED, phases=phases)),), engines(size, memory=memory), GPU))
    assert [(s.phase, s.missing) for s in plan.shortages] == [("start", GIB)]


def test_an_engine_on_devices_of_its_own_never_sleeps(size):
    trainer, engine = make_plan(Layout((policy(size),), engines(size, Place(1)), GPU)).groups
    assert trainer.moments["generate"].rows["policy"]["optimizer"], "no engine shares its device"
    assert engine.moments["train"].rows[GENERATOR]["cache"]


def test_an_engine_without_a_copy_needs_no_sync(size):
    assert "sync" not in only(Layout((policy(size),), engines(size, memory={"copy": False}), GPU))


def test_a_reward_model_computes_while_samples_are_drawn(size):
    reward = frozen(size, "reward", annotates=False, rewards=True, place=Place(share="policy"))
    moments = only(Layout((policy(size), reward), engines(size), GPU))
    assert set(moments["generate"].busy) == {"reward", GENERATOR}
    assert moments["generate"].rows["reward"]["working"] == 9


def test_ranks_on_cpus_add_up_on_the_host(size):
    machine = replace(CPU, processes=True)
    single, double = (
        only(Layout((policy(size, Place(n)),), engines(size, Place(), devices=n), machine)) for n in (1, 2)
    )
    assert double["train"].rows["policy"]["weights"] == 2 * single["train"].rows["policy"]["weights"]
    assert double["generate"].rows[GENERATOR]["cache"] == 2 * single["generate"].rows[GENERATOR]["cache"]


def test_borrowed_heads_count_as_weights(size):
    assert only(Layout((policy(size, borrowed=11),), None, CPU))["train"].rows["policy"]["weights"] == 111


def test_a_cache_without_room_for_a_sequence_is_a_shortage(size):
    small = engines(size, memory={"cache": 100})
    [shortage] = make_plan(Layout((policy(size),), small, GPU)).shortages
    message = "generator: its cache has room for 50 tokens (100 B per device), but the longest sequence has 64"
    assert message in shortage.message
    assert shortage.missing == 28


def test_no_verdict_without_memory(size):
    assert make_plan(Layout((policy(size),), None, replace(CPU, memory=None))).fits is None


def test_a_shortage_shows_its_arithmetic(size):
    large = replace(
        TRAINED, phases={**TRAINED.phases, "train": PhaseMemory({"weights": 3 * GIB, "activations": 9 * GIB})}
    )
    plan = make_plan(Layout((policy(size, memory=large),), None, CPU))
    [shortage] = plan.shortages
    assert (shortage.group, shortage.phase) == ("host", "train")
    assert "needs 12.6 GiB of a host's 8.00 GiB, 4.56 GiB more than it has" in shortage.message
    assert shortage.arithmetic[0] == "policy activations 9.00 GiB"
    assert "policy weights 3.00 GiB = 25 parameters x 4 bytes" in shortage.arithmetic
