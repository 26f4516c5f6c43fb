"""Another process maps GPU memory of this one and copies from it: the speed of CUDA IPC here, without `rlhf`."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

TIMEOUT = 60


def seconds_mapped(nbytes: int, repeats: int) -> dict[str, float]:
    """Median time of the other process's copy, the time of the first (which maps), and sums of both sides' words."""
    context = torch.multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    words = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    process = context.Process(target=_copy, args=(child, repeats), daemon=True)
    process.start()
    child.close()
    try:
        parent.send(torch.multiprocessing.reductions.reduce_tensor(words))
        if not parent.poll(TIMEOUT):
            raise TimeoutError(f"the other process did not answer within {TIMEOUT} s")
        answer: dict[str, Any] = parent.recv()
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
    if "error" in answer:
        raise RuntimeError(f"the other process: {answer['error']}")
    return {**answer, "expected sum": int(words.sum(dtype=torch.int64))}


def _copy(pipe: Any, repeats: int) -> None:
    try:
        rebuild, arguments = pipe.recv()
        start = time.perf_counter()
        source = rebuild(*arguments)
        target = source.clone()
        torch.cuda.synchronize()
        first, times = time.perf_counter() - start, []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        total = int(target.sum(dtype=torch.int64))
        pipe.send({"seconds": statistics.median(times), "first": first, "sum": total})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
