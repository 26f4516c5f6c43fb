"""What is on a device in which phase: who rests, who computes, who sleeps, what is on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.memory import Footprint, Sharding
from rlhf_plugin_plan import EngineLayout, Layout, Machine, RoleLayout, formulas, make_plan, read_shape, sum_of
from rlhf_plugin_plan import engines as engine_parts
from rlhf_plugin_plan.again import gradient_places, left_of_first_step
from rlhf_plugin_plan.busy import forwarding, left, training
from rlhf_plugin_plan.engines import sampling
from rlhf_plugin_plan.heap import LARGE
from rlhf_plugin_plan.phases import loading, resting
from rlhf_testing.tiny import tiny_model

GIB = 2**30
GPU = Machine("cuda", 8 * GIB, None, 8, processes=True)
CPU = Machine("cpu", 8 * GIB)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return read_shape(str(tiny_model(tmp_path_factory.mktemp("m") / "model", hidden=64, layers=3)))


def policy(shape, place=Place(), **more) -> RoleLayout:  # noqa: B008 - frozen
    given = {"sharding": Sharding(), "trained": True, "micro_tokens": 512, "longest": 256, **more}
    return RoleLayout("policy", place, shape, **given)


def engines(shape, place=Place(share="policy"), **footprint) -> EngineLayout:  # noqa: B008 - frozen
    given = {"weight_bytes": 2.0, "share": 0.5, "sleeps": True, **footprint}
    return EngineLayout(place, shape, Footprint(**given), samples=4, longest=256)


def only(layout: Layout):
    [group] = make_plan(layout).groups
    return group.moments


def test_a_role_alone(shape):
    moments = only(Layout((policy(shape),), None, CPU))
    assert list(moments) == ["load", "forward", "train"]
    count = shape.parameters
    assert moments["load"].rows["policy"] == {"weights": 4 * count}
    assert moments["forward"].rows["policy"]["optimizer"] == 8 * count, "it stays between steps"
    assert "gradients" not in moments["forward"].rows["policy"]
    assert moments["train"].rows["policy"]["gradients"] == 4 * count
    assert moments["train"].busy == ("policy",)
    assert moments["train"].rows["process"]["process"] == formulas.PROCESS["cpu"]


def test_a_frozen_role_holds_weights_only(shape):
    moments = only(Layout((policy(shape, trained=False),), None, CPU))
    assert list(moments) == ["load", "forward"]
    assert "optimizer" not in moments["forward"].rows["policy"]


def test_a_precomputed_role_is_gone_before_the_others_come(shape):
    early = replace(policy(shape), name="reference", trained=False, precomputed=True)
    moments = only(Layout((policy(shape, annotated=()), early), None, CPU))
    assert list(moments) == ["precompute", "load", "train"]
    assert set(moments["precompute"].rows) == {"reference", "process"}
    assert moments["precompute"].rows["reference"].keys() >= {"weights", "working"}
    assert all("reference" not in moments[phase].rows for phase in ("load", "train"))


def test_making_buffers_takes_more_than_the_weights(shape):
    """A second copy of what is trained, and communication buffers, which stay; states come with the first step."""
    count = shape.parameters
    flat = Sharding(optimizer_ranks=2, making_bytes=4.0, buffers=1000)
    assert loading(policy(shape, sharding=flat), "cpu") == {"weights": 4 * count, "working": 4 * count + 1000}
    frozen = policy(shape, sharding=replace(flat, buffers=0), trained=False)
    assert loading(frozen, "cpu") == {"weights": 4 * count, "working": 0}
    few = policy(shape, sharding=replace(flat, adapter_rank=2))
    assert loading(few, "cpu")["working"] == 4 * few.trained_parameters + 1000
    roles = (policy(shape, sharding=flat), replace(policy(shape, sharding=flat, micro_tokens=1024), name="critic"))
    moment = only(Layout(roles, None, CPU))["load"]
    assert sorted(p["working"] for name, p in moment.rows.items() if name != "process") == [1000, 4 * count + 1000]
    assert all("optimizer" not in parts for parts in moment.rows.values())


def test_a_divided_model_is_mapped_whole_and_then_computes_once(shape):
    """On CPUs; what is gathered ahead of its use is not there in the first pass. A scalar head is not checked."""
    count = shape.parameters
    divided = Sharding(
        weight_ranks=4, loading_ranks=4, making_bytes=1.0, reads_whole=True, gathered=10**9, in_flight=10**9
    )
    gathers = loading(policy(shape, sharding=divided), "cuda")
    assert gathers == {"weights": count, "working": count + 4 * count}
    few = replace(divided, gathered=0)
    made = count + 4 * shape.widest
    assert made < 4 * count
    assert loading(policy(shape, sharding=few), "cpu") == {"weights": count, "working": 4 * count}
    assert loading(policy(shape, sharding=few), "cuda") == {"weights": count, "working": made}
    critic = replace(shape, outputs=1)
    assert loading(policy(critic, sharding=few), "cuda") == {"weights": count, "working": count}


def test_a_second_copy_of_the_weights_is_held_beside_the_first(shape):
    twice, once = (Sharding(weight_ranks=8, second_ranks=n) for n in (2, 0))
    more, less = (resting(policy(shape, sharding=s))[0]["weights"] for s in (twice, once))
    assert (more, less) == (int(4 * shape.parameters * (1 / 8 + 1 / 2)), int(4 * shape.parameters / 8))


def test_one_trains_while_the_other_rests(shape):
    roles = (policy(shape), replace(policy(shape), name="critic", micro_tokens=1024))
    moments = only(Layout(roles, None, CPU))
    assert moments["train"].busy == ("critic",), "the fullest moment: its micro-batches are larger"
    assert "activations" not in moments["train"].rows["policy"]


def test_the_hybrid_engine_takes_turns(shape):
    role = policy(shape, sharding=Sharding(offloads=True))
    moments = only(Layout((role,), engines(shape), GPU))
    assert "optimizer" not in moments["generate"].rows["policy"]
    assert "optimizer" not in moments["sync"].rows["policy"], "it is put aside before the sync wakes the engine"
    assert moments["sync"].host == moments["generate"].host == 8 * shape.parameters
    assert moments["train"].host == 0
    assert moments["train"].rows["policy"]["optimizer"] == 8 * shape.parameters
    assert set(moments["train"].rows[GENERATOR]) == {"process"}
    claimed = moments["generate"].rows[GENERATOR]
    assert claimed["weights"] + claimed["cache"] == 4 * GIB
    assert moments["sync"].rows[GENERATOR]["cache"], "canaries are scored after a sync"
    quiet = replace(engines(shape), canaries=False)
    assert "cache" not in only(Layout((role,), quiet, GPU))["sync"].rows[GENERATOR]


def test_an_engine_of_its_own_never_sleeps(shape):
    layout = Layout((policy(shape, sharding=Sharding(offloads=True)),), engines(shape, Place(1)), GPU)
    trainer, engine = make_plan(layout).groups
    assert trainer.moments["generate"].rows["policy"]["optimizer"], "nothing shares its device"
    assert engine.moments["train"].rows[GENERATOR]["cache"]


def test_what_the_host_holds_is_not_on_the_device(shape):
    here, away = resting(policy(shape, sharding=Sharding(host_optimizer=True, host_weights=True, master_bytes=4.0)))
    assert here == {}
    assert away == (4 + 12) * shape.parameters
    added, more = training(policy(shape, sharding=Sharding(host_optimizer=True)), "cuda")
    assert "gradients" not in added
    assert more == 4 * shape.parameters


def test_a_host_that_is_too_small_is_said(shape):
    role = policy(shape, Place(4), sharding=Sharding(host_optimizer=True))
    machine = replace(GPU, host_memory=40 * shape.parameters)
    [shortage] = {s.message for s in make_plan(Layout((role,), None, machine)).shortages}
    assert "in the phase 'train' 4 devices of a node put" in shortage


def test_adapters_train_little(shape):
    role = policy(shape, sharding=Sharding(adapter_rank=2))
    few = shape.adapter_parameters(2)
    assert 0 < few < shape.parameters / 5
    assert role.trained_parameters == few
    here, _ = resting(role)
    assert here["weights"] == 4 * (shape.parameters + few)
    assert here["optimizer"] == 8 * few


def test_casts_of_autocast_go_with_checkpointing(shape):
    s = Sharding(bf16=True, cast_bytes=2.0, logits=512)
    whole, _ = training(policy(shape, sharding=s), "cuda")
    less, _ = training(policy(shape, sharding=s, gradient_checkpointing=True), "cuda")
    assert less["activations"] < whole["activations"]
    assert sum_of(less) < sum_of(whole)


def test_experts_lie_beside_the_file_that_they_were_read_from(tmp_path):
    """On a CPU, as long as other weights are views of it; the parts of the largest stack too while it is made."""
    shape = read_shape(str(tiny_model(tmp_path, architecture="mixtral", hidden=64)))
    count, stacks, largest = shape.parameters, shape.merged, max(layer.largest for layer in shape.layers)
    held = replace(policy(shape), sharding=Sharding(keeps_file=True))
    assert resting(held)[0]["weights"] == 4 * (count + stacks)
    assert resting(policy(shape))[0]["weights"] == 4 * count
    assert loading(held, "cpu") == {"weights": 4 * (count + stacks), "working": 4 * largest}
    assert loading(policy(shape), "cuda")["weights"] == 4 * count
    train, forward = (only(Layout((held,), None, CPU))[phase].rows["policy"] for phase in ("train", "forward"))
    assert train["weights"] == forward["weights"] == 4 * (count + stacks)


def test_an_embedding_that_nothing_read_is_not_there_while_models_are_loaded(tmp_path):
    shape = read_shape(str(tiny_model(tmp_path, hidden=64)), "scalar")
    roles = [replace(policy(shape), name=name, sharding=Sharding(keeps_file=True)) for name in ("critic", "policy")]
    moments = only(Layout(tuple(roles), None, CPU))
    read = 4 * (shape.parameters - shape.embedding)
    assert [moments["load"].rows[role.name]["weights"] for role in roles] == [read, read]
    assert [moments["forward"].rows[role.name]["weights"] for role in roles] == [4 * shape.parameters] * 2


def test_muon_keeps_less_and_makes_its_updates_in_the_step(shape):
    adamw, muon = policy(shape), policy(shape, sharding=Sharding(matrix_bytes=4.0))
    kept = [resting(role)[0]["optimizer"] for role in (adamw, muon)]
    assert kept == [8 * shape.parameters, 8 * shape.parameters - 4 * shape.matrices]
    rows = [only(Layout((role,), None, GPU))["train"].rows["policy"]["optimizer"] for role in (adamw, muon)]
    assert rows == kept
    assert "optimizer" not in resting(replace(muon, trained=False))[0]
    adapted = policy(shape, sharding=Sharding(matrix_bytes=4.0, adapter_rank=4))
    assert resting(adapted)[0]["optimizer"] == 4 * shape.adapter_parameters(4), "adapters are matrices"
    step = policy(shape, sharding=Sharding(matrix_bytes=4.0, step_bytes=10_000.0))
    gradients, updates = 4 * shape.parameters, 10_000 * shape.matrices
    assert training(step, "cuda")[0]["working"] == updates, "the fullest moment: activations and logits have gone"
    assert training(step, "cuda")[0]["gradients"] == gradients


def test_states_have_no_more_holes_than_went_before_they_were_made(shape):
    """16 tokens: few activations went, and states of 1000 bytes a parameter lie above them without holes."""
    few, many = (
        replace(policy(shape, micro_tokens=16, longest=16), sharding=Sharding(optimizer_bytes=each))
        for each in (1_000.0, 2_000.0)
    )
    assert training(few, "cpu")[0]["allocator"] == training(many, "cpu")[0]["allocator"]
    none = replace(few, sharding=Sharding(optimizer_bytes=0.0))
    assert training(few, "cpu")[0]["allocator"] > training(none, "cpu")[0]["allocator"]


def test_ranks_on_cpus_add_up_on_the_host(shape):
    machine = Machine("cpu", 8 * GIB, processes=True)
    one, two = (only(Layout((policy(shape, Place(n)),), None, machine)) for n in (1, 2))
    assert two["train"].total == 2 * one["train"].total
    assert one["forward"].rows["policy"]["process"] == formulas.PROCESS["cpu"]


def test_a_cpu_process_keeps_the_heap_that_it_had(shape, published):
    machine = Machine("cpu", 8 * GIB, processes=True)
    roles = (policy(shape), replace(policy(shape), name="critic"))
    moments = only(Layout(roles, None, machine))
    [busy] = moments["train"].busy
    rests = next(r.name for r in roles if r.name != busy)
    assert moments["train"].rows[rests]["allocator"] == left(roles[0]) == sum_of(training(roles[0], "cpu")[0])
    large = policy(read_shape(published("0.6B")))
    added, _ = training(large, "cpu")
    assert left(large) <= sum_of(added) - added["logits"], "blocks of 32 MiB are given back"


def test_in_one_process_sampling_finds_the_heap_that_training_left(shape):
    """A cache of small tensors fits into what the first step left, one of large blocks is beside it; no phase before
    training has it."""
    role = policy(shape, annotated=(), micro_tokens=4096)
    heap = left_of_first_step(role)
    tensor = 2 * 3  # keys and values of three layers

    def moments(rows: int):
        sampler = engines(shape, share=None, weight_bytes=0.0, kv_bytes=4.0, rows=10**6)
        sampler = replace(sampler, samples=rows, prompt_tokens=256)
        made = only(Layout((role,), sampler, CPU))
        return made, sampling(sampler, CPU), formulas.weights(shape.parameters, Sharding())

    made, added, weights = moments(4)
    places = gradient_places(role)
    assert places + sum_of(added) < heap
    assert made["generate"].total == 3 * weights + heap + formulas.PROCESS["cpu"] + formulas.LIBRARIES["cpu"]
    assert "allocator" not in made["load"].rows["process"] or not made["load"].rows["process"]["allocator"]
    assert made["train"].total == only(Layout((role,), None, CPU))["train"].total
    made, added, weights = moments(4096)
    assert added["cache"] >= tensor * LARGE
    own = max(heap, places + sum_of(added) - added["cache"])
    rest = 3 * weights + formulas.PROCESS["cpu"] + formulas.LIBRARIES["cpu"]
    assert made["generate"].total == rest + added["cache"] + own


def test_the_forward_pass_is_the_head_or_a_layer(shape, published):
    assert "logits" not in forwarding(policy(shape), "cpu"), "99 tokens of vocabulary"
    assert "logits" in forwarding(policy(read_shape(published("0.6B"))), "cpu"), "151936"


def test_a_growing_cache_is_full_when_the_prompts_are_done(shape):
    """Unless samples wait: their prompts are computed beside it."""
    alone = replace(engines(shape, share=None, kv_bytes=4.0), prompt_tokens=256, samples=32)
    cache = engine_parts.cache_grown(shape, alone.footprint, 32, 256)
    prompts = engine_parts.prompt_pass(shape, alone.footprint, 256, 256, bf16=False, device="cpu")
    step = engine_parts.decoding_step(shape, alone.footprint, 32, 256)
    assert step < prompts
    assert sampling(alone, CPU) == {"cache": cache, "working": step, "allocator": prompts}
    waiting = replace(alone, footprint=replace(alone.footprint, rows=16))
    assert sampling(waiting, CPU) == {"cache": cache // 2, "working": prompts, "allocator": step // 2}


def test_long_prompts_with_short_answers_peak_before_the_cache(shape):
    long = replace(engines(shape, share=None, kv_bytes=4.0), samples=1, longest=64, prompt_tokens=8192)
    prompts = engine_parts.prompt_pass(shape, long.footprint, 8192, 64, bf16=False, device="cpu")
    made = sampling(long, CPU)
    assert made["working"] == prompts
    assert made["cache"] == 0


def test_the_heap_of_the_layers_and_the_large_blocks_of_the_head_add_up(published):
    """With gradient checkpointing the head is the fullest moment, one layer computed again has more in the heap."""
    s = Sharding(logits=2**24)
    role = policy(read_shape(published("0.6B")), sharding=s, gradient_checkpointing=True, micro_tokens=2048)
    added, _ = training(role, "cpu")
    assert added["logits"] > added["activations"]
    layer = role.shape.layers[0]
    again = formulas.layer_kept(role.shape, layer, 2048, 256, s, "cpu", 1.0).heap
    one = 2048 * 1024 * 4  # a hidden state: 28 layers' inputs and the last norm's two; of a layer's working two
    attention = 2048 * 4 * (2 * (2048 + 1024 + 1024) + 2 * 2048 + 2 * 16 * 160)
    went = (28 + 2) * one + again + 2 * one + attention + 1024 * 3072 * 4  # and a matrix's gradient
    gradients, states = 4 * role.shape.small, 8 * role.shape.small
    assert went < states / 3, "so what went before the states were made is all that can be free among them"
    assert added["allocator"] > again + (gradients + again) / 3 + went
    flat, _ = training(replace(role, sharding=replace(s, flat=True)), "cpu")
    assert added["allocator"] - flat["allocator"] == pytest.approx(gradients / 3 + went, rel=0.01)


def test_a_cache_without_room_for_a_sequence_is_said(shape):
    tight = engines(shape, kv_space=1000, share=None)
    plan = make_plan(Layout((policy(shape),), tight, GPU))
    [shortage] = plan.shortages
    assert "its cache has room for 2 tokens" in shortage.message
    assert "the longest sequence has 256" in shortage.message


def test_nothing_is_judged_without_memory(shape):
    plan = make_plan(Layout((policy(shape),), engines(shape), replace(GPU, memory=None)))
    assert plan.fits is None
    assert plan.shortages == ()


def test_a_shortage_shows_its_arithmetic(shape):
    role = policy(shape, Place(2), sharding=Sharding(optimizer_ranks=2))
    machine = replace(GPU, memory=2**30 + 4 * shape.parameters)
    plan = make_plan(Layout((role,), None, machine))
    assert plan.fits is False
    train = next(s for s in plan.shortages if s.phase == "train")
    assert train.where == "policy 0-1"
    assert "the phase 'train' needs 1.0" in train.message
    assert any("x 8 bytes / 2 ranks" in line for line in train.arithmetic) or shape.parameters * 4 < 2**20
