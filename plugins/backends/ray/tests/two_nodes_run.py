"""The driver on two nodes, run by test_two_nodes.py in a network namespace. It prints one JSON line per scenario."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ray_nodes import PORT
from rlhf.errors import RlhfError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.plugins import Plugins
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher
from worker_standins import OddGenerator, OddTrainer

from tests.support.two_hosts import ADDRESSES


def spec(ranks: int) -> ModelSpec:
    return ModelSpec(RoleSpec("policy", trained=True), "", world_size=ranks)


def spread(launcher: RayLauncher) -> dict[str, Any]:
    """A rank on each node: the ranks run a collective, and weights reach an engine on the other node."""
    launcher.place({"policy": Place(2), GENERATOR: Place(2, share="policy")})
    policy = launcher.launch_trainer(OddTrainer, None, spec(2))
    engines = launcher.launch_generator(OddGenerator, None, GeneratorSpec((0,), str))
    engines.begin_load(1)
    for bucket in policy.stream("buckets", "live", 24, timeout=60.0):
        engines.take(bucket)
    proofs = engines.end_load()
    fingerprints = policy.call("sent_fingerprints", [()] * 2)[0]
    requests = [GenerationRequest((n,), n, Sampling(8)) for n in range(6)]
    return {
        "nodes": [m.facts["address"] for m in policy.members],
        "engines": [m.facts["address"] for m in engines.pool.members.values()],
        "sums": policy.call("adds", [()] * 2),
        "interfaces": [w["GLOO_SOCKET_IFNAME"] for w in policy.call("where", [()] * 2)],
        "rendezvous": policy.call("where", [()] * 2)[0]["spec"].rendezvous,
        "proven": [proof.received == fingerprints for proof in proofs],
        "answers": sorted(n for n, _ in engines.generate(requests)),
    }


def differs(launcher: RayLauncher) -> dict[str, Any]:
    """Node 1 has another version of one of the run's plugins."""
    launcher.place({"policy": Place(2)}, [Plugins.discover().resolve("trainer", "torch")])
    launcher.launch_trainer(OddTrainer, None, spec(2))
    return {}


def loses_a_node(launcher: RayLauncher) -> dict[str, Any]:
    """Node 1 is lost during a call."""
    launcher.place({"policy": Place(2)})
    policy = launcher.launch_trainer(OddTrainer, None, spec(2))
    os.kill(int(sys.argv[1]), signal.SIGKILL)
    policy.call("sleeps", [(30.0,)] * 2)
    return {}


def main(scenario: Callable[[RayLauncher], dict[str, Any]]) -> None:
    head = f"{ADDRESSES[0]}:{PORT}"  # "auto" finds any Ray of this machine, in other namespaces too
    launcher = RayLauncher(RayConfig(address=head, strategy="STRICT_SPREAD"))
    try:
        result = scenario(launcher)
    except RlhfError as error:
        result = {"error": type(error).__name__, "message": str(error)}
    finally:
        launcher.shutdown()
    print(json.dumps({"scenario": scenario.__name__, **result}), flush=True)


if __name__ == "__main__":
    for scenario in (spread, differs, loses_a_node):
        main(scenario)
