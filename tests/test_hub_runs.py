"""A run whose model, reward model and data come from a hub: what it records, and how it resumes when that changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from rlhf_testing.tiny import tiny_model, tiny_reward_model

from tests.support.hub import LoopbackHub

pytestmark = pytest.mark.full

CLI = "from rlhf_cli.main import main; raise SystemExit(main())"
TOKEN = "hf_" + "Xw9" * 12
ROWS = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(4)]
REWARD = """
import os, signal
calls = 0
async def score(prompt, completion, row):
    global calls
    calls += 1
    if calls > int(os.environ.get("CALLS", 999)):
        os.kill(os.getpid(), signal.SIGKILL)
    return len(completion) / 6 + (row["answer"] in completion)
"""


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("published")
    tiny_model(place / "tiny")
    settings = json.loads((place / "tiny/config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (place / "tiny/config.json").write_text(json.dumps(settings))
    (place / "tiny/evil.py").write_text("raise SystemExit('code that came with a model was run')\n")
    (place / "tiny/pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch unpickled'\ntR.")
    tiny_reward_model(place / "judge", seed=1)
    tiny_model(place / "other", seed=2)
    return place


def start(hub, home: Path, config, *flags: str, **environment: str):
    path = Path(config["run"]["output"]).with_suffix(".toml")
    path.write_text(tomli_w.dumps(config))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return subprocess.run(
        [sys.executable, "-c", CLI, "train", str(path), *flags],
        env={**clean, "HF_HOME": str(home), "HF_ENDPOINT": hub.url, "OMP_NUM_THREADS": "1", **environment},
        cwd=home.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_reads_the_commits_of_its_start(folders, tmp_path):
    with LoopbackHub() as hub:
        commits = {
            "dataset owner/sums@main": hub.publish("dataset", "owner/sums", {"train.jsonl": lines(ROWS)}, token=TOKEN),
            "model owner/judge@v1": hub.publish("model", "owner/judge", folders / "judge", ref="v1"),
            "model owner/tiny@main": hub.publish("model", "owner/tiny", folders / "tiny", token=TOKEN),
        }
        (tmp_path / "reward.py").write_text(REWARD)
        config = {
            "run": {"steps": 2, "seed": 1},
            "algorithm": {"use": "grpo", "kl": {"coef": 0.1}},
            "data": {"train": "owner/sums", "batch_size": 4, "max_tokens": 64},
            "policy": {"model": "owner/tiny", "dtype": "fp32"},
            "sampling": {"samples_per_prompt": 3, "max_new_tokens": 6},
            "checkpoint": {"every": 1},
            "reward": [{"use": "file:reward.py"}, {"use": "model:owner/judge@v1", "weight": 0.5}],
        }

        def go(name: str, home: str, *flags: str, **environment: str):
            settings = {**config, "run": {**config["run"], "output": str(tmp_path / name)}}
            return start(hub, tmp_path / home, settings, *flags, **environment)

        baseline = go("whole", "home", HF_TOKEN=TOKEN)
        assert baseline.returncode == 0, baseline.stderr
        died = go("died", "home", HF_TOKEN=TOKEN, CALLS="14")
        assert died.returncode == -9
        hub.publish("dataset", "owner/sums", {"train.jsonl": lines(ROWS[::-1])}, token=TOKEN)
        hub.publish("model", "owner/judge", folders / "other", ref="v1")
        hub.publish("model", "owner/tiny", folders / "other", token=TOKEN)
        # In another home, so that everything comes from the hub once more.
        resumed = go("died", "another", "--resume", HF_TOKEN=TOKEN)
        assert resumed.returncode == 0, resumed.stderr
        assert "resumed after step 1" in resumed.stdout + resumed.stderr

        for name in ("whole", "died"):
            starts = json.loads((tmp_path / name / "manifest.json").read_text())["starts"]
            assert [s["hub"] for s in starts] == [commits] * len(starts)
        weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "died")]
        assert weights[0] == weights[1]
        assert "evil" not in " ".join(p.name for p in (tmp_path / "whole/model").iterdir())
        assert not (tmp_path / "unpickled").exists()
        assert not hub.asked("*/evil.py") + hub.asked("*/pytorch_model.bin")
        for done in (baseline, died, resumed):
            assert TOKEN not in done.stdout + done.stderr
        assert not [p for p in tmp_path.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
