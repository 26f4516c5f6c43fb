"""Placement, devices, environments and options of worker processes."""

from __future__ import annotations

import os
import sys

import numpy
import pytest
from pydantic import ValidationError
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import GENERATOR, Generator, GeneratorSpec, ModelSpec, Place, TakesModule
from rlhf.types import RoleSpec
from rlhf_plugin_processes import ProcessesBackend, launcher
from rlhf_plugin_processes.launcher import ProcessesConfig, ProcessesLauncher, gpus_of
from rlhf_plugin_processes.shared_values import SharedValue
from rlhf_testing.backend import BackendContract
from rlhf_testing.launcher import CountingGenerator
from rlhf_workers.placement import allocate, bundles_of


class TestProcessesBackend(BackendContract):
    backend = ProcessesBackend


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 0}, "greater than or equal to 1"),
        ({"heartbeat": 60.0, "stall_timeout": 60.0}, "heartbeat = 60 must be shorter than stall_timeout = 60"),
        ({"max_restarts": -1}, "greater than or equal to 0"),
        ({"address": "auto"}, "Extra inputs"),
        ({"strategy": "PACK"}, "Extra inputs"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        ProcessesConfig(**options)


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(
        ConfigError, match=r"(?s)does not fit on this machine.*policy +3 ranks x 1 CPUs = 3.*2 CPUs: this machine has 2"
    ):
        ProcessesLauncher(ProcessesConfig(cpus=2)).place({"policy": Place(3)})


def test_a_folder_for_the_output_of_workers_that_cannot_be_made(tmp_path):
    (tmp_path / "workers").touch()
    with pytest.raises(ConfigError, match=r"worker policy-0 .*/policy-0.log: File exists\. .* --launcher.reports"):
        launcher.open_log(tmp_path / "workers", "policy-0")


def test_every_process_of_torchrun_would_be_a_whole_run(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"rank 1 of 4 that torchrun started.*--launcher.use ray"):
        ProcessesLauncher.check(ProcessesConfig(), {"policy": Place()}, None, "auto")
    with pytest.raises(ConfigError, match="torchrun"):
        ProcessesLauncher().place({"policy": Place()})


def test_calls_in_the_wrong_order_are_refused():
    launcher = ProcessesLauncher()
    spec = ModelSpec(RoleSpec("policy"), "")
    with pytest.raises(CapabilityError, match="'policy' was not placed"):
        launcher.launch_trainer(None, None, spec)
    launcher.place({"policy": Place(2)})
    with pytest.raises(CapabilityError, match="placed with 2 ranks and launched with 1"):
        launcher.launch_trainer(None, None, spec)
    with pytest.raises(CapabilityError, match="'generator' was not placed"):
        launcher.launch_generator(CountingGenerator, None, GeneratorSpec((0,), str))
    with pytest.raises(CapabilityError, match="launcher 'processes' has already placed a run"):
        launcher.place({"policy": Place()})


def test_generators_that_need_the_trainers_module_are_refused():
    class Inside(TakesModule, Generator):
        name = "inside"

    with pytest.raises(CapabilityError, match=r"'inside' samples from a trainer's module.*launcher 'processes'"):
        ProcessesLauncher.check(ProcessesConfig(), {}, Inside, "auto")
    with pytest.raises(
        ConfigError, match=r"sync.transport = 'broadcast' is not possible: the generator does not support links"
    ):
        ProcessesLauncher.check(ProcessesConfig(), {}, CountingGenerator, "broadcast")


@pytest.fixture
def four_gpus(monkeypatch):
    monkeypatch.setattr("rlhf_plugin_processes.launcher.visible_gpus", lambda: ["4", "5", "6", "7"])


def test_gpus_are_given_in_order_and_shared_by_the_guests(four_gpus):
    places = {"policy": Place(2), "critic": Place(2, share="policy"), GENERATOR: Place(1, 2)}
    launcher = ProcessesLauncher()
    launcher.place(places)
    assert launcher._reserved_devices.cuda
    devices = {
        role: [gpus_of(a, launcher._bundles, ["4", "5", "6", "7"]) for a in allocations]
        for role, allocations in launcher._reserved_devices.allocations.items()
    }
    assert devices == {"policy": [["4"], ["5"]], "critic": [["4"], ["5"]], GENERATOR: [["6", "7"]]}
    with pytest.raises(ConfigError, match=r"policy +5 ranks x 1 GPUs = 5"):
        ProcessesLauncher().place({"policy": Place(5)})
    with pytest.raises(ConfigError, match=r"launcher.cpus = 2: .* on the 4 GPUs"):
        ProcessesLauncher(ProcessesConfig(cpus=2)).place(places)


def test_no_gpus_without_gpus():
    [allocation] = allocate({"policy": Place(1, 2)}, bundles_of({"policy": Place(1, 2)}, "CPU"), ["here"])["policy"]
    assert gpus_of(allocation, [2], []) is None
    assert allocation.threads == 2


def test_values_keep_what_is_inside_them_and_are_read_only():
    small, large = numpy.arange(4), numpy.arange(100_000)
    inner = SharedValue.of(large)
    outer = SharedValue.of({"small": small, "inner": inner, "text": "x" * 50_000})
    del inner
    count = len(os.listdir("/proc/self/fd"))
    content = outer.value()
    assert (content["small"] == small).all()
    array = content["inner"].value()
    assert (array == large).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert len(os.listdir("/proc/self/fd")) <= count + 2


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux, but this is darwin"):
        ProcessesLauncher().place({"policy": Place()})
