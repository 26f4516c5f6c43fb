"""The choice of the link by the placement of the policy and the engines."""

from __future__ import annotations

import sys

import pytest
from rlhf.errors import ConfigError, WorkerError
from rlhf.interfaces import GENERATOR, GeneratorSpec, Place
from rlhf_workers.engines.front import EngineGroup
from rlhf_workers.engines.weight_link import choose_kind
from rlhf_workers.placement import allocate, bundles_of
from worker_standins import OddGenerator


def chosen(places: dict[str, Place], kind: str = "GPU", transport: str = "auto", links: bool = True, nodes: int = 1):
    bundles = bundles_of(places, kind)
    addresses = [f"node {n * nodes // len(bundles)}" for n in range(len(bundles))]
    allocations = allocate(places, bundles, addresses)
    return choose_kind(transport, links, allocations["policy"], allocations[GENERATOR], kind == "GPU", addresses)


HYBRID = {"policy": Place(4), GENERATOR: Place(2, 2, share="policy")}
SEPARATE_PLACES = {"policy": Place(4), GENERATOR: Place(2, 2)}
BESIDE_THE_CRITIC = {"policy": Place(2), "critic": Place(2), GENERATOR: Place(2, share="critic")}
ON_ONE_RANK = {"policy": Place(2), GENERATOR: Place(1, share="policy")}
ON_SPARE_DEVICES = {"policy": Place(1, 2), GENERATOR: Place(1, 2, share="policy")}


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        (HYBRID, "shared"),
        (ON_ONE_RANK, "shared"),
        (SEPARATE_PLACES, "broadcast"),
        (BESIDE_THE_CRITIC, "broadcast"),
        (ON_SPARE_DEVICES, None),  # the rank computes on the first of its two GPUs, and the engine on both
    ],
)
def test_on_gpus_the_placement_decides_the_kind_of_link(places, kind):
    assert chosen(places) == kind
    assert chosen(places, transport="store") is None
    for other in {"shared", "broadcast"} - {kind}:
        with pytest.raises(
            ConfigError, match=rf"sync.transport = '{other}' is not possible: .* Possible here: 'store'"
        ):
            chosen(places, transport=other)


def test_on_cpus_the_store_is_the_default_and_links_are_possible(monkeypatch):
    assert chosen(HYBRID, "CPU") is None
    assert [chosen(SEPARATE_PLACES, "CPU", kind) for kind in ("shared", "broadcast")] == ["shared", "broadcast"]
    assert chosen(SEPARATE_PLACES, "CPU", "broadcast", nodes=2) == "broadcast"
    with pytest.raises(ConfigError, match="an engine is not on the node of rank 0 of the policy"):
        chosen(SEPARATE_PLACES, "CPU", "shared", nodes=2)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"but this is darwin\. Possible here: 'store', 'broadcast'"):
        chosen(SEPARATE_PLACES, "CPU", "shared")


def test_a_generator_without_links_uses_the_store():
    assert chosen(SEPARATE_PLACES, links=False) is None
    with pytest.raises(
        ConfigError, match=r"the generator does not support links .*Possible here: 'store', or remove the option"
    ):
        chosen(SEPARATE_PLACES, transport="broadcast", links=False)


def test_an_engine_is_not_replaced_where_nothing_sends_it_weights():
    class Replaced:
        """One engine died and was started again."""

        dead = ()
        numbers = [[0]]

        def replace(self):
            return self.numbers.pop() if self.numbers else []

    group = EngineGroup(OddGenerator, GeneratorSpec((0,), str), Replaced(), None, None)
    group._has_weights = True
    with pytest.raises(WorkerError, match=r"launch_generator\(\) got no `refresh`, which would send it the"):
        group._replace_dead()
