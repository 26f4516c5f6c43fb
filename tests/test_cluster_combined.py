"""Rare combinations in a cluster run: adapters whose base is the reference, evaluation of their moving average, a
reward model on several ranks, evaluation with stale batches, phases, and a resume with another placement."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from rlhf_testing.tiny import tiny_model

from tests.forks import Forks
from tests.runs import Workshop, merged, require
from tests.test_average import told_of
from tests.test_cluster_runs import Training

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.full]

require("ray", "vllm", "deepspeed", "peft")

SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 32}


def test_adapters_scores_evaluation_and_stale_batches_together(tiny: Workshop, tmp_path: Path, forks: Forks) -> None:
    place = Workshop(tmp_path, tiny_model(tmp_path / "tiny", **SIZES), tiny.data)
    judge = tiny_model(tmp_path / "judge", head="scalar", seed=5, **SIZES)
    config = place.config(
        "grpo",
        "run",
        run={"steps": 3},
        launcher={"use": "ray", "cpus": 4},
        trainer={"use": "deepspeed", "stage": 3, "lr": 1e-2, "lora": {"rank": 4}, "ema_decay": 0.5},
        generator={"use": "vllm", "kv_cache_gib": 0.25},
        placement={
            "policy": {"ranks": 2},
            "reference": {"share": "policy"},
            "generator": {"ranks": 1, "share": "policy"},
            "reward_model": {"ranks": 2},
        },
        algorithm={"kl": {"coef": 0.1, "where": "loss"}},
        stream={"staleness": 1},
        eval={"every": 1},
        data={"eval": [{"path": str(tiny.data), "max_rows": 3, "name": "held_out"}]},
        checkpoint={"every": 1, "keep": 9},
    )
    config["reward"] = [*config["reward"], {"use": f"model:{judge}", "name": "reward_model"}]
    first = Training(forks, place, config).finish()
    assert first.code == 0, first.said
    lines = first.lines()
    assert [line["stream/version"] for line in lines] == [0, 0, 1]
    assert all(math.isfinite(line["eval/reward"]) for line in lines)
    assert all(line["sync/canary"] < 1e-4 for line in lines)
    assert lines[0]["policy/kl_reference"] == pytest.approx(0, abs=1e-6), "adapters start without effect"
    assert lines[2]["policy/kl_reference"] > 0
    embedded = dict.fromkeys(("launcher", "trainer", "generator", "placement"))
    expected = told_of(place, first, merged(config, embedded))
    assert lines[2]["eval/reward"] == pytest.approx(expected, rel=1e-5), "the average is evaluated and exported"

    layout = {"policy": {"ranks": 1}, "reference": None, "generator": {"share": None}, "reward_model": {"ranks": 1}}
    other = merged(config, {"placement": layout, "trainer": {"stage": 2}, "run": {"steps": 4}})
    resumed = Training(forks, place, other, "--resume").finish()
    assert resumed.code == 0, resumed.said
    assert "continues as a different run" in resumed.said
    assert [line["step"] for line in resumed.lines()] == [1, 2, 3, 4]
    assert resumed.lines()[3]["stream/version"] == 3, "generated after the run got a further step"


def test_separate_roles_and_a_resume_on_fewer_ranks_give_the_numbers_of_one_process(
    tiny: Workshop, tmp_path: Path, forks: Forks
) -> None:
    """PPO with critic and reference on their own devices, a reward model on those of two engines, and stale batches. It
    is stopped, and resumed with one rank and one engine on one device. One process then trains on the same samples."""
    place = Workshop(tmp_path, tiny_model(tmp_path / "tiny", **SIZES), tiny.data)
    critic = tiny_model(tmp_path / "critic", head="scalar", seed=7, **SIZES)
    judge = tiny_model(tmp_path / "judge", head="scalar", seed=5, **SIZES)
    config = place.config(
        "ppo",
        "run",
        launcher={"use": "ray", "cpus": 6},
        trainer={"use": "deepspeed", "stage": 3, "lr": 1e-2},
        critic={"model": str(critic)},
        generator={"use": "vllm", "kv_cache_gib": 0.25},
        placement={
            "policy": {"ranks": 2},
            "critic": {"ranks": 2},
            "reference": {"share": "critic"},
            "generator": {"ranks": 2},
            "reward_model": {"ranks": 2, "share": "generator"},
        },
        algorithm={"kl": {"coef": 0.05}},
        stream={"staleness": 1},
        checkpoint={"every": 1},
    )
    config["reward"] = [*config["reward"], {"use": f"model:{judge}", "name": "reward_model"}]
    first = Training(forks, place, config)
    with first.held_after(1):
        first.process.kill(signal.SIGTERM)
    stopped = first.finish()
    assert stopped.code == 128 + signal.SIGTERM, stopped.said
    assert len(stopped.lines()) in (1, 2)
    roles = ("critic", "reference", "generator", "reward_model")
    layout = {"policy": {"ranks": 1}} | {role: {"ranks": 1, "share": "policy"} for role in roles}
    resumed = Training(
        forks, place, merged(config, {"placement": layout, "trainer": {"stage": 2}}), "--resume"
    ).finish()
    assert resumed.code == 0, resumed.said

    single_process = dict.fromkeys(("launcher", "generator", "placement")) | {
        "trainer": {"use": "torch", "stage": None}
    }
    replay = {
        "rollout": {"use": "replay", "path": str(resumed.path / "rollouts")},
        "run": {"output": str(tmp_path / "again")},
    }
    reference = place.train_config(merged(merged(config, single_process), replay))
    assert [line["stream/version"] for line in resumed.lines()] == [0, 0, 1]
    for metrics, expected in zip(resumed.lines(), reference.lines(), strict=True):
        names = [name for name in expected if name.endswith(("/loss", "/grad_norm")) or name == "reward"]
        assert len(names) >= 4
        assert {n: metrics[n] for n in names} == {n: pytest.approx(expected[n], rel=1e-3, abs=1e-4) for n in names}
