"""Bundles and allocations of a placement. No cluster is needed."""

from __future__ import annotations

import pytest
from rlhf.errors import ConfigError
from rlhf.interfaces import GENERATOR, Place
from rlhf_workers.placement import ClusterNode, allocate, bundles_of, check_fits, device_kind


def nodes(*cpus_and_gpus: tuple[int, int]) -> list[ClusterNode]:
    return [ClusterNode(f"id{n}", f"10.0.0.{n + 1}", {"CPU": c, "GPU": g}) for n, (c, g) in enumerate(cpus_and_gpus)]


HYBRID = {"policy": Place(4), "critic": Place(4, share="policy"), GENERATOR: Place(2, 2, share="policy")}


def test_one_bundle_per_rank_of_roles_that_own_devices():
    places = {"policy": Place(2, 2), "reference": Place(2, share="policy"), GENERATOR: Place(1, 4)}
    assert [(b.role, b.resources) for b in bundles_of(places, "GPU")] == [
        ("policy", {"GPU": 2, "CPU": 1}),
        ("policy", {"GPU": 2, "CPU": 1}),
        (GENERATOR, {"GPU": 4, "CPU": 1}),
    ]
    assert [b.resources for b in bundles_of(places, "CPU")] == [{"CPU": 2}, {"CPU": 2}, {"CPU": 4}]
    assert device_kind(nodes((8, 0), (8, 1))) == "GPU"
    assert device_kind(nodes((8, 0))) == "CPU"


def test_colocated_roles_share_a_bundle_and_see_its_gpus():
    bundles = bundles_of(HYBRID, "GPU")
    allocations = allocate(HYBRID, bundles, ["a"] * 4)
    assert [s.bundle for s in allocations["policy"]] == [s.bundle for s in allocations["critic"]] == [0, 1, 2, 3]
    assert [s.slots for s in allocations["critic"]] == [((0, 0),), ((1, 0),), ((2, 0),), ((3, 0),)]
    assert [s.slots for s in allocations[GENERATOR]] == [((0, 0), (1, 0)), ((2, 0), (3, 0))]
    charged = [sum(s.cpus for role in allocations.values() for s in role if s.bundle == b) for b in range(4)]
    assert charged == [pytest.approx(1.0, abs=1e-3)] * 4
    assert all(c <= 1 for c in charged)


def test_on_cpus_devices_are_cores():
    places = {"policy": Place(2, 3), "reference": Place(1, share="policy"), GENERATOR: Place(1, 2)}
    allocations = allocate(places, bundles_of(places, "CPU"), ["a"] * 3)
    assert [s.threads for s in allocations["policy"]] == [3, 3]
    assert [(s.threads, s.cpus) for s in allocations["reference"]] == [(3, 1.5)], "as many as each rank of its host"
    assert [(s.threads, s.cpus) for s in allocations[GENERATOR]] == [(2, 2.0)]


def test_more_ranks_than_the_host_divide_its_devices():
    places = {"policy": Place(2, 2), "reward": Place(4, share="policy")}
    allocations = allocate(places, bundles_of(places, "GPU"), ["a", "a"])
    assert [s.slots for s in allocations["reward"]] == [((0, 0),), ((0, 1),), ((1, 0),), ((1, 1),)]


def test_ranks_are_ordered_by_node():
    """Ray distributes bundles in any order; neighbouring ranks are still on the same node."""
    allocations = allocate(HYBRID, bundles_of(HYBRID, "GPU"), ["a", "b", "a", "b"])
    assert [s.bundle for s in allocations["policy"]] == [0, 2, 1, 3]
    assert [s.slots for s in allocations[GENERATOR]] == [((0, 0), (2, 0)), ((1, 0), (3, 0))]


def test_an_engine_over_two_nodes_is_refused():
    with pytest.raises(ConfigError, match=r"\[placement.generator\]: the 2 devices of rank 0 would be on 2 nodes"):
        allocate(HYBRID, bundles_of(HYBRID, "GPU"), ["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("places", "resources", "strategy"),
    [
        (HYBRID, [(8, 4)], "PACK"),
        (HYBRID, [(8, 2), (8, 2)], "SPREAD"),
        ({"policy": Place(2, 4), "critic": Place(1, 8)}, [(8, 8), (8, 8)], "PACK"),
        ({"policy": Place(2)}, [(2, 0), (2, 0)], "STRICT_SPREAD"),
        ({"policy": Place(2)}, [(1, 0), (2, 0)], "STRICT_PACK"),
    ],
)
def test_placements_that_fit(places, resources, strategy):
    check_fits(places, nodes(*resources), strategy)


def test_gpus_that_an_engine_does_not_use_are_refused():
    places = {"policy": Place(2), GENERATOR: Place(1, 2, workers=1)}
    check_fits(places, nodes((4, 0)), "PACK")
    with pytest.raises(ConfigError, match="devices = 2 GPUs but only 1 workers"):
        check_fits(places, nodes((4, 4)), "PACK")


@pytest.mark.parametrize(
    ("places", "resources", "strategy", "lines"),
    [
        (
            {"policy": Place(2, 4), "critic": Place(2, share="policy"), GENERATOR: Place(3, 2)},
            [(16, 8), (16, 4)],
            "PACK",
            [
                "no node has room left for a rank of 'generator' with 2 devices",
                "policy     2 ranks x 4 GPUs = 8",
                "critic     2 ranks on the devices of policy",
                "generator  3 engines x 2 GPUs = 6",
                "needed     14 GPUs",
                "nodes      12 GPUs: 10.0.0.1 has 8, 10.0.0.2 has 4",
                'share devices (share = "policy")',
            ],
        ),
        ({"policy": Place(1, 16)}, [(16, 8), (16, 8)], "PACK", ["a rank of 'policy' with 16 devices", "16 GPUs: 10.0"]),
        ({"policy": Place(3)}, [(4, 0), (4, 0)], "STRICT_SPREAD", ["3 ranks own devices", "there are 2 nodes"]),
        (
            {"policy": Place(3)},
            [(2, 0), (2, 0)],
            "STRICT_PACK",
            ["no node has room for all ranks", "4 CPUs: 10.0.0.1 has 2"],
        ),
        ({"policy": Place(4)}, [(3, 4)], "PACK", ["each rank that owns devices also takes 1 CPU; available: 3 CPUs"]),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(places, resources, strategy, lines):
    with pytest.raises(ConfigError) as info:
        check_fits(places, nodes(*resources), strategy)
    for line in lines:
        assert line.lower() in str(info.value).lower()
