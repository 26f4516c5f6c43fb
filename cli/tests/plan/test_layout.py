"""The devices of a placement."""

from __future__ import annotations

from rlhf.interfaces import GENERATOR, Place
from rlhf_cli.plan.layout import Machine, device_groups

GPUS = Machine("cuda", processes=True)


def occupancy(places, machine=GPUS):
    return [(g.title, g.count, dict(g.holds)) for g in device_groups(places, machine)]


def test_roles_with_their_own_devices_form_their_own_groups():
    assert occupancy({"policy": Place(2), "critic": Place(1), GENERATOR: Place(2, 2)}) == [
        ("policy 0-1", 2, {"policy": 1}),
        ("critic 0", 1, {"critic": 1}),
        ("generator 0-3", 4, {GENERATOR: 1}),
    ]


def test_roles_that_share_devices_form_one_group():
    places = {"policy": Place(4), "critic": Place(4, share="policy"), GENERATOR: Place(2, 2, share="policy")}
    assert occupancy(places) == [("policy 0-3", 4, {"policy": 1, "critic": 1, GENERATOR: 1})]


def test_a_smaller_role_shares_a_part_of_the_devices():
    places = {"policy": Place(4), "reference": Place(2, share="policy"), GENERATOR: Place(1, 2, share="policy")}
    assert occupancy(places) == [
        ("policy 0-1", 2, {"policy": 1, "reference": 1, GENERATOR: 1}),
        ("policy 2-3", 2, {"policy": 1}),
    ]


def test_a_rank_of_several_devices_holds_its_model_on_the_first():
    assert occupancy({"policy": Place(2, 2)}) == [
        ("policy 0", 1, {"policy": 1}),
        ("policy 1", 1, {}),
        ("policy 2", 1, {"policy": 1}),
        ("policy 3", 1, {}),
    ]


def test_a_role_shares_all_devices_of_a_rank():
    for ranks, second in ((2, {"policy": 1, "reference": 1}), (1, {"policy": 1})):
        places = {"policy": Place(2, 2), "reference": Place(ranks, share="policy")}
        assert occupancy(places) == [
            ("policy 0", 1, {"policy": 1, "reference": 1}),
            ("policy 1", 1, {}),
            ("policy 2", 1, second),
            ("policy 3", 1, {}),
        ]


def test_several_ranks_on_one_device():
    places = {"policy": Place(1, 2), "reference": Place(2, share="policy")}
    assert occupancy(places) == [("policy 0", 1, {"policy": 1, "reference": 1}), ("policy 1", 1, {"reference": 1})]


def test_cpus_share_the_host_and_one_process_one_device():
    places = {"policy": Place(2), GENERATOR: Place(1, 2)}
    assert occupancy(places, Machine("cpu", processes=True)) == [("host", 1, {"policy": 2, GENERATOR: 1})]
    assert occupancy(places, Machine("cuda")) == [("device", 1, {"policy": 2, GENERATOR: 1})]
