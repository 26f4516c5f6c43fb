"""Ray's control process (GCS) is killed: the run ends with a message about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import tomli_w
from rlhf_testing.tiny import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

COMPONENTS = Path(__file__).parent / "components.py"
REWARD = "def score(prompt, completion, row):\n    {}\n    return sum(c in '0123456789' for c in completion) / 6\n"
BLOCKS = "import pathlib, time\n    pathlib.Path({!r}).touch()\n    time.sleep(600)"


def started(folder: Path, ray: str, reward: str) -> subprocess.Popen[str]:
    """Start ``rlhf train`` with a trainer and an engine on a Ray of its own, which keeps its files in ``ray``."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    model = tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
    config = {
        "run": {"output": str(folder / "run"), "steps": 100_000, "seed": 1},
        "algorithm": {"use": "rloo"},
        "data": {"train": str(folder / "data.jsonl"), "batch_size": 4, "max_tokens": 64},
        "policy": {"model": str(model), "dtype": "fp32"},
        "trainer": {"lr": 1e-3},
        "sampling": {"samples_per_prompt": 3, "max_new_tokens": 6},
        "reward": [{"use": f"file:{folder / 'reward.py'}"}],
        "generator": {"use": f"file:{COMPONENTS}:OwnCopy", "flag": str(folder / "never")},
        "launcher": {"use": "ray", "cpus": 2, "object_store_gib": 0.1},
    }
    file = folder / "run.toml"
    file.write_text(tomli_w.dumps(config))
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_cli.main", "train", str(file)],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said").open("w"),
        env={**env, "RAY_TMPDIR": ray, "RAY_worker_niceness": "0"},
        start_new_session=True,
    )


@pytest.mark.parametrize("moment", ["between workers' calls", "inside a reward"])
def test_a_killed_gcs_ends_the_run_with_its_own_message(moment, tmp_path):
    flag = tmp_path / "flag" if moment == "inside a reward" else tmp_path / "run" / "metrics.jsonl"
    reward = REWARD.format(BLOCKS.format(str(flag)) if moment == "inside a reward" else "")
    log = tmp_path / "said"
    with tempfile.TemporaryDirectory(prefix="rlhf-ray-", dir="/tmp", ignore_cleanup_errors=True) as ray:  # short
        run = started(tmp_path, ray, reward)
        family = []
        try:
            while not flag.exists() or not (flag.name == "flag" or flag.read_text()):
                assert run.poll() is None, log.read_text()
                time.sleep(0.1)
            family = psutil.Process(run.pid).children(recursive=True)
            [gcs] = [p for p in family if p.name() == "gcs_server"]
            workers = [p for p in family if p.name() == "raylet" or p.name().startswith("ray::RayWorker")]
            assert len(workers) >= 2
            gcs.kill()
            assert run.wait(300) == 1
            # Ray's own agents notice only after a minute
            _, left = psutil.wait_procs(workers, timeout=30)
            assert left == [], "workers and raylet must end with the run"
        finally:
            for process in (run, *family):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("rlhf: Ray's control process (GCS) at 127.0.0.1:"), log.read_text()
    assert "is gone: Connection refused" in lines[-1]
    assert lines[-1].endswith("Continue from the newest checkpoint with --resume.")
    assert "Traceback" not in log.read_text()
