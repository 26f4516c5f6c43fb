"""Memory and speed of a rank where rows are divided over 1, 2 and 4 ranks (`trainer.sequence_parallel`), on a CPU.

    .venv/bin/python benchmarks/long_contexts.py [--tokens 4096] [--ranks 1 2 4] [--trainer fsdp] [--result FILE]

One micro-batch holds one sequence of three quarters of the tokens and one of a quarter. Each rank has one thread.
Prints one JSON object. For each number of ranks:

- `kept`: bytes that one rank keeps for the backward pass, weights excepted (each storage once). Exact.
- `peak`: how far the resident memory of one rank rises during an update, at most.
- `wall`, `processor`: seconds of an update (median); processor seconds are of one rank. `speed`: tokens per second of
  wall time, as a multiple of one rank's. On a machine that other processes use too, wall times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from settings import SIZES, median

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trainer", default="fsdp", choices=["fsdp", "deepspeed"])
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--result", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        from rlhf_testing.tiny import tiny_model

        tiny_model(Path(folder) / "model", **SIZES)
        for ranks in options.ranks:
            figures[str(ranks)] = on_ranks(Path(folder), ranks, options)
    first = figures[str(options.ranks[0])]
    for measured in figures.values():
        measured["speed"] = first["wall"] / measured["wall"]
    words = {name: getattr(options, name) for name in ("tokens", "trainer", "dtype", "checkpointing", "repeats")}
    result = {**words, "ranks": figures}
    if options.result:
        options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def on_ranks(folder: Path, ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """The largest figures of any rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # large tensors get pages of their own, which go back to the system when they are freed
    memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = {**os.environ, **memory, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, __file__, "rank", str(folder), str(ranks), str(port), str(options.tokens), options.trainer]
    words += [options.dtype, str(int(options.checkpointing)), str(options.repeats)]
    started = [
        subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(ranks)
    ]
    outputs = [rank.communicate()[0] for rank in started]
    if any(rank.returncode for rank in started):
        raise SystemExit("a rank failed")
    figures = [json.loads(text.splitlines()[-1]) for text in outputs]
    return {name: max(figure[name] for figure in figures) for name in figures[0]}


def rank(
    folder: str,
    ranks: str,
    port: str,
    tokens: str,
    name: str,
    dtype: str,
    checkpointing: str,
    repeats: str,
    number: str,
) -> None:
    """One rank; the last line that it prints is its figures."""
    import torch
    from rlhf.ops.packing import SequenceData, UnitData, pack
    from rlhf.ops.reduce import weigh
    from rlhf.plugins import Plugins
    from rlhf_testing.optimizer_batch import columns, slim_batch

    from tests.support.losses import SequenceLoss
    from tests.support.rank_batches import spec
    from tests.support.token_parts import kept_bytes

    loss, count = SequenceLoss(), int(tokens)
    generator = torch.Generator().manual_seed(0)
    units = []
    for length in (3 * count // 4, count // 4):
        ids = torch.randint(3, 90, (length,), generator=generator).tolist()
        units.append(UnitData([SequenceData(ids, {"loss_mask": [place > length // 4 for place in range(length)]})]))
    micro = slim_batch(weigh(columns(pack(units)), loss.reduce()), loss)
    model_spec = spec(
        Path(folder), int(number), int(ranks), port, dtype=dtype, gradient_checkpointing=bool(int(checkpointing))
    )
    kind = Plugins.discover().resolve("trainer", name).cls
    trainer = kind(kind.Config(lr=1e-6, device="cpu", sequence_parallel=int(ranks)), model_spec)
    trainer.update([micro], loss, {}, {})  # makes the optimizer's state
    activations = kept_bytes(trainer, [micro], loss)
    trainer.zero_grad()
    wall, processor, peak = [], [], 0
    for _ in range(int(repeats)):
        base = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the memory of now
        start, used = time.perf_counter(), time.process_time()
        trainer.update([micro], loss, {}, {})
        wall.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        peak = max(peak, resident("VmHWM") - base)
    figures = {"kept": activations, "peak": peak, "wall": median(wall), "processor": median(processor)}
    print(json.dumps(figures), flush=True)
    os._exit(0)


def resident(field: str) -> int:
    """Bytes."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
    else:
        main()
