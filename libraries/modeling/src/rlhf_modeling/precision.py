"""Chooses fp32 or bf16 arithmetic from the processor's features and a short measurement."""

from __future__ import annotations

import math
import time
from functools import cache
from pathlib import Path

import torch
from rlhf.errors import CapabilityError, ConfigError
from rlhf.interfaces import ModelSpec, Precision

MIN_GAIN = 1.3
"""bf16 is chosen on a CPU only if its matrix product is at least this much faster."""


def choose_device(name: str) -> torch.device:
    """``auto``: the first GPU where torch sees one, else the CPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise CapabilityError(
            f"device = 'cuda' but torch {torch.__version__} sees no GPU. Use device = 'cpu' or 'auto', or install a "
            "build of torch for this machine's GPU."
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_precision(dtype: str, device: torch.device, on_processor: Precision | None = None) -> Precision:
    """The precision to compute in.

    Args:
        dtype: ``auto`` | ``fp32`` | ``bf16``.
        on_processor: what ``auto`` means on a CPU, from an earlier measurement; None: measured here.
    """
    if dtype == "auto":
        return on_processor if on_processor is not None and device.type == "cpu" else _automatic(device.type)
    if dtype not in ("fp32", "bf16"):
        raise ConfigError(f"dtype = {dtype!r} is not known: use 'auto', 'fp32' or 'bf16'")
    return Precision(dtype == "bf16", f"{dtype} on {device.type}: asked for")


def precision_of(spec: ModelSpec, device: torch.device) -> Precision:
    """The precision to compute a role's model in. Weights that are stored in bf16 are computed with in bf16."""
    if spec.storage == "bf16" and spec.dtype == "auto":
        return Precision(True, f"bf16 on {device.type}: the weights are stored in bf16")
    return choose_precision(spec.dtype, device, spec.on_processor)


@cache
def _automatic(device_type: str) -> Precision:
    """Measured once per process, as a second measurement could give another answer."""
    if device_type == "cuda":
        supported = torch.cuda.is_bf16_supported()
        why = "the GPU supports bf16" if supported else "the GPU does not support bf16"
        return Precision(supported, f"{'bf16' if supported else 'fp32'} on cuda: {why}")
    flags = bf16_flags()
    if not flags:
        return Precision(False, "fp32 on cpu: the processor has no bf16 arithmetic (avx512_bf16, amx_bf16, bf16)")
    gain = measured_gain()
    bf16 = gain >= MIN_GAIN
    speed = f"a matrix product in bf16 is {gain:.1f} times as fast as in fp32 ({', '.join(flags)})"
    return Precision(bf16, f"{'bf16' if bf16 else 'fp32'} on cpu: {speed}")


def bf16_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """The processor's features for bf16 matrix products, as the kernel or torch names them."""
    try:
        line = next((x for x in cpuinfo.read_text().splitlines() if x.lower().startswith(("flags", "features"))), "")
    except OSError:
        line = ""
    found = tuple(f for f in ("avx512_bf16", "amx_bf16", "bf16") if f in line.split())
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if not found and not line:  # no /proc (macOS): torch reads the processor's features
        found = tuple(f for f in ("avx512_bf16", "amx_bf16", "bf16") if capabilities.get(f))
    return found


def measured_gain(size: int = 512, repeats: int = 10) -> float:
    """Time of an fp32 matrix product over that of a bf16 one, best of ``repeats`` each; about 0.05 s.

    Measured in turn and with one thread, because on a busy machine two threads wait for each other in every product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
        for repeat in range(repeats + 1):
            for dtype, least in best.items():
                a = torch.ones(size, size, dtype=dtype)
                start = time.perf_counter()
                torch.mm(a, a)
                if repeat > 0:  # the first product includes building the kernel
                    best[dtype] = min(least, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]
