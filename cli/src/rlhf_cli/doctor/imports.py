"""Checks that import packages, each in a child process with a deadline."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from rlhf.errors import short_list
from rlhf.interfaces import Finding
from rlhf.plugins import Plugins
from rlhf_runtime.output.run_directory import driver_gpus

from rlhf_cli.doctor import probes
from rlhf_cli.doctor.child import ask
from rlhf_cli.doctor.machine import gib
from rlhf_cli.doctor.versions import VISION

_TRAP = "torchvision::nms"
_UNINSTALL = f"pip uninstall -y {' '.join(VISION)}"


def present(module: str) -> bool:
    """Whether a top-level module is available, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def vision(timeout: float, modules: Sequence[str] = VISION) -> Finding:
    """torchvision, torchaudio and torchcodec must fit this torch, or be absent."""
    packages = [m for m in modules if present(m)]
    if not packages:
        return Finding("vision packages", "ok", f"{', '.join(modules)} are not installed: text models do not need them")
    broken = []
    for name in packages:
        answer = ask(probes.module, name, timeout)
        if answer.error:
            broken.append(f"{name}: {answer.error}")
    if broken:
        advice = f"it does not match torch and breaks transformers and vLLM; text models do not need it: {_UNINSTALL}"
        return Finding("vision packages", "fail", short_list(broken), advice)
    return Finding("vision packages", "ok", f"{', '.join(packages)} can be imported")


def transformers(timeout: float) -> Finding:
    """The classes of transformers that load models."""
    answer = ask(probes.transformers, None, timeout)
    if answer.error:
        if _TRAP in answer.log or _TRAP in answer.error:
            advice = f"this torchvision does not match torch; text models do not need it: {_UNINSTALL}"
        else:
            advice = "python -c 'import transformers' shows the whole error; reinstall transformers with pip"
        return Finding("transformers", "fail", answer.error, advice)
    return Finding("transformers", "ok", f"{answer.value}, imported in {answer.seconds:.1f} s")


def torch_device(timeout: float) -> list[Finding]:
    """torch, the device that it computes on, and NCCL."""
    answer, gpus = ask(probes.torch_device, None, timeout), driver_gpus()
    if answer.error:
        fix = "install torch again; with GPUs, the build for the CUDA version of the driver (nvidia-smi shows it)"
        return [Finding("torch", "fail", answer.error, fix), Finding("nccl", "skipped", "the check of torch failed")]
    facts = answer.value
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "no CUDA"
    text = f"{facts['version']} ({build}), imported in {answer.seconds:.1f} s; "
    if facts["devices"]:
        names = [
            f"{d['name']} ({d['capability']}, {gib(d['free'])} of {gib(d['total'])} free)" for d in facts["devices"]
        ]
        checks = [Finding("torch", "ok", f"{text}{short_list(names)}; driver: {short_list(gpus) or 'not asked'}")]
    else:
        flags = ", ".join(facts["bf16_flags"])
        gain = f"bf16 ({flags}) measured {facts['bf16_gain']:.1f} x as fast as fp32" if flags else "no bf16 arithmetic"
        text += f"CPU {facts['cpu']}: {gain}; {facts['threads']} threads"
        if gpus:
            fix = f"install a build of torch for CUDA; this one ({facts['version']}) leaves the GPUs unused"
            checks = [Finding("torch", "warn", f"{text}; the driver lists {short_list(gpus)}", fix)]
        else:
            checks = [Finding("torch", "ok", text)]
    return [*checks, _nccl(facts)]


def _nccl(facts: dict[str, object]) -> Finding:
    if not facts["gloo"]:
        fix = "install a build of torch with torch.distributed and gloo"
        return Finding("nccl", "fail", "this torch has no gloo, which processes use to communicate", fix)
    if not facts["cuda"]:
        return Finding("nccl", "skipped", "no CUDA in this torch: processes communicate over gloo")
    if not facts["nccl"]:
        fix = "install a build of torch with NCCL; without it several GPUs cannot work together"
        return Finding("nccl", "warn", "CUDA, but no NCCL in this torch", fix)
    return Finding("nccl", "ok", f"{facts['nccl']}")


def plugins(timeout: float) -> Finding:
    """Imports every plugin, like ``rlhf plugins list --check``. If one crashes, the others are still checked."""
    entries = Plugins.discover().list()
    pending = [[e.kind, f"{e.distribution}/{e.name}"] for e in entries if e.status == "ok"]
    status = {(e.kind, f"{e.distribution}/{e.name}"): e.status for e in entries}
    while pending:
        answer = ask(probes.plugins, pending, timeout)
        for (kind, ref), value in zip(pending, answer.values, strict=False):
            status[kind, ref] = value
        pending = pending[len(answer.values) :]
        # The child reports plugins in order, so it died in the first one without a report.
        if pending:
            kind, ref = pending.pop(0)
            status[kind, ref] = f"importing it ended the process: {answer.error}"
    broken = [f"{kind} {ref}: {text}" for (kind, ref), text in status.items() if text != "ok"]
    if broken:
        fix = "uninstall or repair the distribution; a run that does not select it is not affected"
        return Finding("plugins", "fail", "\n".join(broken), fix)
    count, owners = len(status), len({e.distribution for e in entries})
    text = f"{count} plugin{'s' * (count != 1)} of {owners} distribution{'s' * (owners != 1)}, all can be imported"
    return Finding("plugins", "ok", text)
