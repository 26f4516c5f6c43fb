"""Code that runs in child processes: ``python -m rlhf_plugin_doctor.probes NAME JSON``. See ``child.py``.

A probe imports what it is about, and reports JSON values. It catches nothing: what it raises is what the doctor shows.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from rlhf.errors import RlhfError
from rlhf.plugins.registration import first_cause

from rlhf_plugin_doctor import node as on_node

Report = Callable[[Any], None]


def torch_device(argument: Any, report: Report) -> None:
    """What torch computes on."""
    import torch
    from rlhf_modeling.precision import bf16_flags, measured_gain

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        with torch.cuda.device(index):
            free, total = torch.cuda.mem_get_info()
            torch.ones(2, 2, device="cuda").mm(torch.ones(2, 2, device="cuda")).sum().item()  # kernels for this chip?
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        devices.append({"name": name, "capability": f"{major}.{minor}", "total": total, "free": free})
    flags = bf16_flags()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available() and bool(torch.version.cuda)
    report(
        {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "devices": devices,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "bf16_flags": flags,
            "bf16_gain": None if devices or not flags else measured_gain(),
            "threads": torch.get_num_threads(),
            "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
        }
    )


def module(argument: str, report: Report) -> None:
    """Import one module, ``torch`` first."""
    importlib.import_module("torch")
    report(getattr(importlib.import_module(argument), "__version__", "?"))


def transformers(argument: Any, report: Report) -> None:
    """The classes that every model is loaded with; transformers imports what they need only when they are named."""
    import transformers

    found = [transformers.AutoModelForCausalLM, transformers.AutoTokenizer, transformers.PreTrainedModel]
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    report({"version": transformers.__version__, "classes": len(found)})


def vllm(argument: Any, report: Report) -> None:
    """vLLM and the platform it found."""
    import vllm
    from vllm import LLM
    from vllm.platforms import current_platform

    report(
        {
            "version": vllm.__version__,
            "entry": LLM.__name__,
            "platform": type(current_platform).__name__,
            "device": current_platform.device_type,
            "unspecified": current_platform.is_unspecified(),
        }
    )


def deepspeed(argument: Any, report: Report) -> None:
    """DeepSpeed, its accelerator, and what it needs for building its operators; nothing is built."""
    import shutil
    import sysconfig
    from pathlib import Path

    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    accelerator = get_accelerator()
    builders = {}
    for name in (
        ("CPUAdamBuilder", "ShareMemCommBuilder") if accelerator.device_name() == "cpu" else ("CPUAdamBuilder",)
    ):
        builder = accelerator.create_op_builder(name)
        builders[name] = builder is not None and bool(builder.is_compatible(verbose=False))
    compiler = cpp_extension.get_cxx_compiler()
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    report(
        {
            "version": deepspeed.__version__,
            "accelerator": accelerator.device_name(),
            "operators": builders,
            "compiler": compiler if shutil.which(compiler) else None,
            "wanted_compiler": compiler,
            "ninja": cpp_extension.is_ninja_available(),
            "header": header.is_file(),
        }
    )


def ray_import(argument: Any, report: Report) -> None:
    """Ray's version."""
    import ray

    report({"version": ray.__version__})


def ray_start(argument: Any, report: Report) -> None:
    """Start a small Ray of its own, on the loopback interface alone, run one task, and stop it."""
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    with tempfile.TemporaryDirectory(prefix="rlhf-doctor-") as folder:  # not /tmp/ray, where a running Ray is noted
        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 * 2**20, "_temp_dir": folder}
        ray.init(address="local", num_cpus=1, log_to_driver=False, **options)
        try:
            look: Any = ray.remote(on_node.look_around)
            report(sorted(ray.get(look.remote([]), timeout=60)))
        finally:
            ray.shutdown()


def cluster(argument: dict[str, Any], report: Report) -> None:
    """Connect to a Ray cluster and ask every node what it has.

    ``argument``: ``address``, ``timeout`` (s) and ``paths``, which the nodes should see. Reports ``nodes`` (id,
    address, resources) and then one value a node: id, ``versions``, ``missing`` paths, ``shm`` bytes; or ``error``.
    """
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(on_node)
    ray.init(address=argument["address"], log_to_driver=False, logging_level=logging.ERROR)
    alive = [node for node in ray.nodes() if node["Alive"]]
    keys = {"id": "NodeID", "address": "NodeManagerAddress", "resources": "Resources"}
    report({"nodes": [{ours: node[key] for ours, key in keys.items()} for node in alive]})
    look: Any = ray.remote(num_cpus=0)(on_node.look_around)
    asked = {
        node["NodeID"]: look.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(argument["paths"])
        for node in alive
    }
    for node, answer in asked.items():
        try:
            report({"id": node} | ray.get(answer, timeout=argument["timeout"]))
        except RayError as error:
            report({"id": node, "error": f"{type(error).__name__}: {error}".splitlines()[0]})


def plugins(argument: list[list[str]], report: Report) -> None:
    """Import plugins, ``argument`` being (kind, reference) of each; reports what is wrong with it, or ``ok``."""
    from rlhf.plugins import Plugins

    found = Plugins.discover()
    for kind, ref in argument:
        try:
            found.resolve(kind, ref)
        except RlhfError as error:
            report(str(error))
        else:
            report("ok")


def run_plugins(argument: dict[str, Any], report: Report) -> None:
    """The plugins of a run file, with their options checked: ``argument`` has ``path`` and ``overrides``.

    Reports their manifest (kind, name, distribution, version) and the options of the launcher.
    """
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.components import build_algorithm, resolved_run
    from rlhf_runtime.config.load import load
    from rlhf_runtime.config.runfile import RunFile

    config = load(argument["path"], [(key, value) for key, value in argument["overrides"]])
    found = Plugins.discover()
    found.check_requirements(config.run.requires)
    config = resolved_run(found, config)
    algorithm, used = build_algorithm(found, config.algorithm, config.origins)
    for kind in ("launcher", "trainer", "generator", "rollout", "env"):
        choice = getattr(config, kind)
        unused = kind in ("rollout", "generator") and algorithm.data != "prompts"
        if choice is not None and not (unused and choice.use == RunFile.model_fields[kind].default.use):
            used.append(found.resolve(kind, choice.use))
    for kind in ("reward", "observer"):
        used += [found.resolve(kind, choice.use) for choice in getattr(config, kind)]
    report({"manifest": found.manifest(used), "launcher": config.launcher.options})


PROBES: dict[str, Callable[[Any, Report], None]] = {
    p.__name__: p
    for p in [torch_device, module, transformers, vllm, deepspeed, ray_import, ray_start, cluster, plugins, run_plugins]
}


def main(name: str, argument: str) -> None:
    """Run a probe. Standard output gets ``{"value": ...}`` for what it reports and ``{"error": text}`` for what it
    raises, one a line, and nothing else: the libraries' own prints go to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(key: str, value: Any) -> None:
        out.write(json.dumps({key: value}, default=str) + "\n")
        out.flush()

    try:
        PROBES[name](json.loads(argument), lambda value: write("value", value))
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        write("error", str(error) if isinstance(error, RlhfError) else first_cause(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries do at exit is not what was asked
