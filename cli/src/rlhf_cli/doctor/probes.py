"""Probes: functions that the doctor runs in child processes (see ``child.py``).

A probe imports a package and reports JSON values. It catches no exceptions, because the doctor shows them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rlhf.errors import RlhfError

Report = Callable[[Any], None]


def torch_device(argument: Any, report: Report) -> None:
    """The devices of torch."""
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
    """Import the classes that load models: transformers imports their dependencies only when they are accessed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, __version__  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    report(__version__)


def plugins(argument: list[list[str]], report: Report) -> None:
    """Import plugins. ``argument``: (kind, reference) of each. Reports the problem of each plugin, or ``ok``."""
    from rlhf.plugins import Plugins

    registry = Plugins.discover()
    for kind, ref in argument:
        try:
            registry.resolve(kind, ref)
        except RlhfError as error:
            report(str(error))
        else:
            report("ok")


def run_plugins(argument: dict[str, Any], report: Report) -> None:
    """The kinds and names of a run file's plugins, with their options checked: ``argument`` has ``path`` and
    ``overrides``."""
    from rlhf.plugins import Plugins
    from rlhf_runtime.config.components import Selections, chosen_by
    from rlhf_runtime.config.load import load
    from rlhf_runtime.config.runfile import RunFile

    config = load(argument["path"], [(key, value) for key, value in argument["overrides"]])
    registry = Plugins.discover()
    registry.check_requirements(config.run.requires)
    selections = Selections.of(registry, config)
    config, used = selections.config, selections.algorithm.plugins()
    offline = selections.algorithm.build(None).data != "prompts"
    for kind, path, choice in chosen_by(config):
        unused = offline and kind in ("rollout", "generator") and choice.use == RunFile.model_fields[kind].default.use
        if kind not in ("algorithm", "curriculum") and not path.endswith(".trainer") and not unused:
            used.append(selections[path].resolved)
    report(sorted({f"{plugin.kind} {plugin.name}" for plugin in used}))
