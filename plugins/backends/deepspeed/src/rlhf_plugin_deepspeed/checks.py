"""The check ``deepspeed`` of ``rlhf doctor``."""

from __future__ import annotations

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.interfaces import Check, Examination, Finding


class DeepSpeedCheck(Check):
    """DeepSpeed: it can be imported, and could build the operators that it compiles at first use."""

    name = "deepspeed"

    def examine(self, examination: Examination) -> list[Finding]:
        if importlib.util.find_spec("deepspeed") is None:
            return [Finding("deepspeed", "skipped", "not installed; needed by the trainer `deepspeed` only")]
        answer = examination.ask(import_deepspeed)
        if answer.error:
            fix = "python -c 'import deepspeed' shows all of it; pip install deepspeed again"
            return [Finding("deepspeed", "fail", answer.error, fix)]
        facts = answer.value
        text = f"{facts['version']} on {facts['accelerator']}, imported in {answer.seconds:.1f} s"
        lacking = [f"the compiler {facts['wanted_compiler']}"] if facts["compiler"] is None else []
        lacking += [] if facts["ninja"] else ["ninja"]
        lacking += [] if facts["header"] else ["Python.h (the package python3-dev)"]
        lacking += [f"the requirements of {name}" for name, fits in facts["operators"].items() if not fits]
        if lacking:
            fix = "DeepSpeed compiles operators at first use: install the missing requirements"
            return [Finding("deepspeed", "warn", f"{text}; missing: {', '.join(lacking)}", fix)]
        operators = f"{', '.join(facts['operators'])} can be built ({facts['compiler']})"
        return [Finding("deepspeed", "ok", f"{text}; {operators}")]


def import_deepspeed(argument: Any, report: Callable[[Any], None]) -> None:
    """DeepSpeed, its accelerator, and the requirements for building its operators; nothing is built."""
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
