"""Launching on a real Ray: placement, environments, versions, and clean-up."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from pydantic import ValidationError
from rlhf.errors import ConfigError, PluginVersionMismatch, WorkerError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.plugins import Plugins
from rlhf.types import RoleSpec
from rlhf_plugin_ray.config import RayConfig
from rlhf_workers.driver.version_check import check_versions
from rlhf_workers.process.worker import COMPARED, installed_version
from worker_standins import OddConfig, OddGenerator, OddTrainer


def spec(role: str = "policy", ranks: int = 1) -> ModelSpec:
    return ModelSpec(RoleSpec(role, trained=True), "", world_size=ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "ray://head:10001"}, "The Ray client .* is not supported"),
        ({"address": "head"}, "set 'auto' or HOST:PORT"),
        (
            {"address": "auto", "cpus": 4, "object_store_gib": 1.0},
            "cpus and object_store_gib can be set only for a Ray that the run starts",
        ),
        ({"heartbeat": 60.0, "stall_timeout": 60.0}, "heartbeat = 60 must be shorter than stall_timeout = 60"),
        ({"heartbeat": 0.0}, "greater than 0"),
        ({"max_restarts": -1}, "greater than or equal to 0"),
        ({"strategy": "pack"}, "STRICT_SPREAD"),
        ({"nodes": 2}, "Extra inputs"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        RayConfig(**options)


def test_workers_get_threads_gpus_and_environment(launch, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    launcher = launch(env={"RLHF_TEST": "yes"})
    launcher.place({"policy": Place(2, 2), "critic": Place(share="policy")})
    reports = launcher.launch_trainer(OddTrainer, None, spec(ranks=2)).call("where", [()] * 2)
    reports += launcher.launch_trainer(OddTrainer, None, spec("critic")).call("where", [()])
    assert [f["OMP_NUM_THREADS"] for f in reports] == ["2", "2", "2"]
    assert {f["RLHF_TEST"] for f in reports} == {"yes"}
    assert {f["GLOO_SOCKET_IFNAME"] for f in reports} == {"lo"}
    assert {f["folder"] for f in reports} == {os.getcwd()}
    assert len({f["pid"] for f in reports} | {os.getpid()}) == 4
    assert not any(f["torch"] for f in reports), "only a component imports torch"


def test_an_explicit_number_of_threads_is_respected(launch, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = launch()
    launcher.place({"policy": Place(1, 3)})
    assert launcher.launch_trainer(OddTrainer, None, spec()).call("where", [()])[0]["OMP_NUM_THREADS"] == "1"


def test_an_impossible_placement_is_refused_at_once(launch):
    start = time.monotonic()  # start_timeout is ten minutes
    with pytest.raises(
        ConfigError, match=r"(?s)does not fit on the cluster.*policy +5 ranks x 1 CPUs = 5.*4 CPUs: 127.0.0.1"
    ):
        launch().place({"policy": Place(5)})
    assert time.monotonic() - start < 60


def test_devices_of_other_jobs_are_waited_for_until_the_timeout(launch):
    first, second = launch(), launch(start_timeout=1.0)
    first.place({"policy": Place(3)})
    with pytest.raises(ConfigError, match=r"the 2 CPUs of the placement within 1 s .*Free now: 1 CPUs"):
        second.place({"policy": Place(2)})
    first.shutdown()
    third = launch(start_timeout=120.0)
    third.place({"policy": Place(4)})


def test_workers_are_found_by_name_in_a_namespace(launch):
    launcher = launch(namespace="mine")
    launcher.place({"policy": Place(), GENERATOR: Place()})
    policy = launcher.launch_trainer(OddTrainer, None, spec())
    launcher.launch_generator(OddGenerator, None, GeneratorSpec((0,), str))
    actor = ray.get_actor("policy-0", namespace="mine")
    assert ray.get(actor.pulse.remote()) == ray.get(policy.members[0].side_call("pulse"))
    ray.get_actor("engine-0", namespace="mine")
    other = launch(namespace="mine")
    other.place({"policy": Place()})
    with pytest.raises(ConfigError, match=r"policy-0 .*launcher.namespace = 'mine'\. Set another namespace"):
        other.launch_trainer(OddTrainer, None, spec())


def test_a_failed_start_releases_everything(launch):
    launcher = launch()
    launcher.place({"policy": Place(), GENERATOR: Place()})
    policy = launcher.launch_trainer(OddTrainer, None, spec())
    pid = policy.members[0].facts["pid"]
    cause = r"engine 0 \(node 127.0.0.1, pid \d+\): start\(\) raised ValueError: no engine today"
    with pytest.raises(WorkerError, match=cause):
        launcher.launch_generator(OddGenerator, OddConfig(fail_start=True), GeneratorSpec((0,), str))
    gone(pid)
    free_again()


def test_shutdown_releases_everything(launch):
    launcher = launch()
    launcher.place({"policy": Place(2), GENERATOR: Place(2)})
    policy = launcher.launch_trainer(OddTrainer, None, spec(ranks=2))
    launcher.launch_generator(OddGenerator, None, GeneratorSpec((0,), str))
    launcher.shutdown()
    gone(*(m.facts["pid"] for m in policy.members))
    free_again()


# --------------------------------------------------------------------------------------- versions


def test_workers_resolve_the_plugins_of_the_run(launch, tmp_path):
    file = tmp_path / "my_loss.py"
    file.write_text(
        "from rlhf.interfaces import Loss\n"
        "class Mine(Loss):\n"
        "    def outputs(self): return ('logprobs',)\n"
        "    def reduce(self): return {}\n"
        "    def __call__(self, x): return None\n"
    )
    plugins = Plugins.discover()
    used = [plugins.resolve("trainer", "torch"), plugins.resolve("loss", f"file:{file}")]
    file.unlink()  # the plugin is sent as text
    launcher = launch()
    launcher.place({"policy": Place()}, used)
    policy = launcher.launch_trainer(OddTrainer, None, spec())
    [answer] = policy.call("same", [(used[1].cls(),)])
    assert type(answer) is used[1].cls


def test_another_version_of_a_plugin_stops_the_run(launch):
    used = replace(Plugins.discover().resolve("trainer", "torch"), version="9.9.9")
    launcher = launch()
    launcher.place({"policy": Place()}, [used])
    with pytest.raises(
        PluginVersionMismatch, match=r"node 127.0.0.1: .*trainer 'torch' \(rlhf-plugin-local 9.9.9\) is version"
    ):
        launcher.launch_trainer(OddTrainer, None, spec())


def test_another_version_of_a_framework_stops_the_run():
    def facts(address: str, **versions: str) -> dict:
        names = {n: installed_version(n) for n in COMPARED}
        all_ = {"python": platform.python_version(), "ray": ray.__version__, **names, **versions}
        return {"address": address, "versions": all_, "problem": None}

    check_versions([facts("10.0.0.1"), facts("10.0.0.2")])
    with pytest.raises(PluginVersionMismatch) as info:
        check_versions([facts("10.0.0.1"), facts("10.0.0.2", torch="2.0.0"), facts("10.0.0.3", python="3.12.1")])
    with pytest.raises(PluginVersionMismatch, match=r"node 10\.0\.0\.4: transformers is 4\.0\.0 there and"):
        check_versions([facts("10.0.0.4", transformers="4.0.0")])
    assert "node 10.0.0.2: torch is 2.0.0 there and" in str(info.value)
    assert "node 10.0.0.3: python is 3.12.1 there and" in str(info.value)
    assert "10.0.0.1" not in str(info.value)


# ------------------------------------------------------------------------------------------- parts


def gone(*pids: int) -> None:
    for _ in range(600):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.1)
    raise AssertionError(f"still there: {[p for p in pids if Path(f'/proc/{p}').exists()]}")


def free_again() -> None:
    for _ in range(600):
        if ray.available_resources().get("CPU") == 4.0:
            return
        time.sleep(0.1)
    raise AssertionError(f"free: {ray.available_resources()}")
