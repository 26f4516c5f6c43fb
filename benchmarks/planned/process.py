"""This process's resident size, and its peak while something runs. Linux only."""

from __future__ import annotations

import gc
from pathlib import Path


def resident(key: str) -> int:
    """``VmRSS`` or ``VmHWM``, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[key].split()[0]) * 1024


def forget_peak() -> None:
    """``VmHWM`` becomes ``VmRSS``."""
    Path("/proc/self/clear_refs").write_text("5")


def weigh() -> int:
    """The process as it is once everything is imported; to be called then."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.mixtral import modeling_mixtral  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    gc.collect()
    return resident("VmRSS")
