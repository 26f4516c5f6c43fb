"""A driver that starts a Ray of its own, run by test_own_ray.py. The argument says how the driver ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_ray.config import RayConfig
from rlhf_plugin_ray.launcher import RayLauncher
from worker_standins import OddGenerator, OddTrainer


def main(mode: str) -> None:
    options = {"address": sys.argv[2]} if len(sys.argv) > 2 else {"cpus": 2, "object_store_gib": 0.1}
    if "RAY_ADDRESS" in os.environ:  # options are only for a Ray that the run starts
        options = {}
    launcher = RayLauncher(RayConfig(show_output=mode == "shows", **options))
    try:
        launcher.place({"policy": Place(), GENERATOR: Place()})
        policy = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), ""))
        launcher.launch_generator(OddGenerator, None, GeneratorSpec((0,), str))
        policy.call("same", [(b"x" * 100_000,)])
        print(json.dumps({"address": policy.members[0].facts["address"]}), flush=True)
        if mode == "shows":
            policy.call("prints", [("hello from a worker",)])
        if mode == "stops":  # as `timeout` and a closed terminal ask a run to stop, which then finishes its step
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
                os.killpg(0, number)
            policy.call("sleeps", [(5.0,)])
        if mode == "raises":
            raise ValueError("a reward failed")
        if mode in ("shows", "waits"):
            policy.call("sleeps", [(120.0,)])
        if mode == "forgets":  # like a controller that fails during its construction
            os._exit(3)
    finally:
        launcher.shutdown()
    print("ended", flush=True)
    time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1])
