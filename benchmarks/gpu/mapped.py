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
    ours, theirs = context.Pipe()
    words = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    process = context.Process(target=_copy, args=(theirs, repeats), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.send(torch.multiprocessing.reductions.reduce_tensor(words))
        if not ours.poll(TIMEOUT):
            raise TimeoutError(f"the other process did not answer within {TIMEOUT} s")
        found: dict[str, Any] = ours.recv()
    finally:
        process.join(5)
        if process.is_alive():
            process.kill()
    if "error" in found:
        raise RuntimeError(f"the other process: {found['error']}")
    return {**found, "expected sum": int(words.sum(dtype=torch.int64))}


def _copy(pipe: Any, repeats: int) -> None:
    try:
        rebuild, arguments = pipe.recv()
        start = time.perf_counter()
        theirs = rebuild(*arguments)
        mine = theirs.clone()
        torch.cuda.synchronize()
        first, times = time.perf_counter() - start, []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            mine.copy_(theirs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        total = int(mine.sum(dtype=torch.int64))
        pipe.send({"seconds": statistics.median(times), "first": first, "sum": total})
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})
