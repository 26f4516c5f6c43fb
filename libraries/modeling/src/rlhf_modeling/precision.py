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
    """``auto``: the first GPU that torch sees, else the CPU."""
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
    if dtype == "bf16":
        _require_bf16(device, "dtype", "Set dtype = 'fp32'")
    return Precision(dtype == "bf16", f"{dtype} on {device.type}: as requested")


def precision_of(spec: ModelSpec, device: torch.device) -> Precision:
    """The precision in which a role's model computes. Weights that are stored in bf16 are used in bf16."""
    if spec.storage == "bf16" and spec.dtype == "auto":
        _require_bf16(device, "storage", "Remove the option")
        return Precision(True, f"bf16 on {device.type}: the weights are stored in bf16")
    return choose_precision(spec.dtype, device, spec.on_processor)


def _without_bf16() -> str:
    """Why the GPU does not compute in bf16; empty if it does. torch emulates bf16 on older GPUs, which is slow."""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return ""
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}, but bf16 arithmetic needs 8.0"


def _require_bf16(device: torch.device, option: str, cure: str) -> None:
    """Raises CapabilityError if ``option`` chooses bf16 on a GPU without it."""
    if device.type == "cuda" and (lacking := _without_bf16()):
        raise CapabilityError(f"{option} = 'bf16': {lacking}. {cure}, or use a newer GPU.")


@cache
def _automatic(device_type: str) -> Precision:
    """Measured once per process, because a second measurement could give a different result."""
    if device_type == "cuda":
        lacking = _without_bf16()
        return Precision(not lacking, f"fp32 on cuda: {lacking}" if lacking else "bf16 on cuda: the GPU supports bf16")
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
    features = tuple(f for f in ("avx512_bf16", "amx_bf16", "bf16") if f in line.split())
    capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    if not features and not line:  # no /proc (macOS): torch reads the processor's features
        features = tuple(f for f in ("avx512_bf16", "amx_bf16", "bf16") if capabilities.get(f))
    return features


def measured_gain(size: int = 512, repeats: int = 10) -> float:
    """Time of an fp32 matrix product divided by the time of a bf16 one, best of ``repeats`` each; about 0.05 s.

    The two are measured alternately and with one thread, because on a busy machine two threads wait for each other in
    every product.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = dict.fromkeys((torch.float32, torch.bfloat16), math.inf)
        for repeat in range(repeats + 1):
            for dtype, seconds in best.items():
                a = torch.ones(size, size, dtype=dtype)
                start = time.perf_counter()
                torch.mm(a, a)
                if repeat > 0:  # the first product includes building the kernel
                    best[dtype] = min(seconds, time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return best[torch.float32] / best[torch.bfloat16]
