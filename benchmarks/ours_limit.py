"""The arithmetic limit: rate of one large matrix product, in floating-point operations per second, fp32 and bf16."""

from __future__ import annotations

import json
import time

import torch
from settings import THREADS

SIZE, REPEATS = 2048, 7


def rate(dtype: torch.dtype) -> float:
    """The best of several repeats, because the result is used as an upper limit."""
    a, times = torch.ones(SIZE, SIZE, dtype=dtype), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 2 * SIZE**3 / min(times[1:])


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    print(json.dumps({"fp32": rate(torch.float32), "bf16": rate(torch.bfloat16)}))
