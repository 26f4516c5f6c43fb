"""The driver that ``ray job submit`` runs in test_job.py. It does not name the cluster."""

from __future__ import annotations

import json
import os

from rlhf.interfaces import ModelSpec, Place
from rlhf.types import RoleSpec
from rlhf_plugin_ray.launcher import RayLauncher
from worker_standins import OddTrainer

launcher = RayLauncher()
try:
    launcher.place({"policy": Place(2, 3)})
    policy = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), "", world_size=2))
    facts = policy.call("where", [()] * 2)
finally:
    launcher.shutdown()
threads = [f["OMP_NUM_THREADS"] for f in facts]
print(json.dumps({"threads": threads, "mine": os.environ.get("OMP_NUM_THREADS")}), flush=True)
