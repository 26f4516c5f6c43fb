"""What is left of a process's heap: the places of gradients, not what activations took, where states are in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rlhf.interfaces import GENERATOR, Place
from rlhf.interfaces.memory import Footprint, Sharding
from rlhf_plugin_plan import EngineLayout, Layout, Machine, RoleLayout, read_shape
from rlhf_plugin_plan.again import found_again, gradient_places, left_by, left_of_first_step
from rlhf_plugin_plan.busy import left_by_forward, left_by_training
from rlhf_plugin_plan.heap import HOLES
from rlhf_testing.tiny import tiny_model

CPU = Machine("cpu", 8 * 2**30)
BOTH = ("policy", GENERATOR)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return read_shape(str(tiny_model(tmp_path_factory.mktemp("m") / "model", hidden=64, layers=3)))


def role(shape, tokens: int, annotated=("logprobs",), **sharding) -> RoleLayout:
    made = RoleLayout("policy", Place(), shape, Sharding(**sharding), True, tokens, 256, annotated=annotated)
    assert shape.small == shape.parameters, "all of its tensors are in the heap"
    return made


def run(policy: RoleLayout, samples: int = 4, longest: int = 256, prompts: int = 64) -> Layout:
    footprint = Footprint(kv_bytes=4.0, rows=10**6)
    sampler = EngineLayout(Place(share="policy"), policy.shape, footprint, samples, longest, prompts)
    return Layout((policy,), sampler, CPU)


def test_gradients_leave_their_places_and_holes(shape):
    policy, size = role(shape, 512), 4 * shape.parameters
    assert gradient_places(policy) == size + int(size / 3)
    assert gradient_places(replace(policy, trained=False)) == 0
    assert gradient_places(role(shape, 512, flat=True)) == 0, "one large block"


def test_states_lie_where_the_first_activations_were(shape):
    """8 bytes a parameter of the heap that was there before them; an average and fp32 weights were there already."""
    policy, count = role(shape, 512), shape.parameters
    before = left_by_training(policy) - HOLES * 8 * count
    assert left_of_first_step(policy) == pytest.approx(before - 8 * count, abs=1)
    averaged = role(shape, 512, average_bytes=4.0, master_bytes=4.0)
    assert left_of_first_step(averaged) == left_of_first_step(policy)
    few = role(shape, 2)
    assert left_by_training(few) - HOLES * 8 * count < 8 * count
    assert left_of_first_step(few) == 0, "the states take all of it, and more"
    assert left_of_first_step(replace(policy, trained=False)) == 0


def test_adapters_have_hardly_any_states_so_that_the_heap_stays(shape):
    policy = role(shape, 512, adapter_rank=2)
    assert left_of_first_step(policy) > 0.9 * left_by_training(policy)
    layout = run(policy)
    assert found_again(layout, BOTH, "forward", ["policy"]) == left_of_first_step(policy) - left_by_forward(policy)


def test_another_phase_is_beside_the_gradients(shape):
    """With small micro-batches nothing else of training's heap is found again."""
    policy = role(shape, 2)
    layout = run(policy, samples=1, longest=8, prompts=4)
    sampled, read = left_by(layout, GENERATOR, "generate"), left_by_forward(policy)
    assert min(sampled, read) > 0
    heap = gradient_places(policy) + max(sampled, read)
    assert heap < left_by_training(policy)
    assert found_again(layout, BOTH, "generate", [GENERATOR]) == heap - sampled
    assert found_again(layout, BOTH, "forward", ["policy"]) == heap - read
    assert found_again(layout, BOTH, "train", ["policy"]) == 0, "training has all of its heap itself"


def test_large_micro_batches_of_the_first_step_are_found_again(shape):
    """What a phase takes fits into it."""
    policy = role(shape, 4096)
    layout = run(policy)
    sampled = left_by(layout, GENERATOR, "generate")
    left = left_of_first_step(policy)
    assert left > gradient_places(policy) + sampled
    assert found_again(layout, BOTH, "generate", [GENERATOR]) == left - sampled
    assert left < left_by_training(policy), "but not what is taken beside the states later"


def test_training_finds_what_more_sampling_left(shape):
    policy = role(shape, 2)
    layout = run(policy, samples=64, longest=128)
    sampled, own = left_by(layout, GENERATOR, "generate"), left_by_training(policy)
    assert gradient_places(policy) + sampled > own
    assert found_again(layout, BOTH, "train", ["policy"]) == gradient_places(policy) + sampled - own


def test_only_what_works_in_a_phase_leaves_something(shape):
    policy = role(shape, 512, annotated=())
    layout = run(policy)
    assert left_by(layout, "policy", "forward") == 0
    scorer = replace(policy, name="scorer", trained=False, rewards=True)
    layout = Layout((policy, scorer), layout.engines, CPU)
    assert left_by(layout, "scorer", "generate") == left_by_forward(scorer) > 0
    assert left_by(layout, "scorer", "forward") == left_by(layout, "scorer", "train") == 0
    gone = Layout((policy, replace(scorer, precomputed=True)), layout.engines, CPU)
    assert left_by(gone, "scorer", "generate") == 0
    alone = Layout((replace(policy, trained=False),), None, CPU)
    assert found_again(alone, ["policy"], "forward", ["policy"]) == 0, "nothing is trained, nothing was sampled"
