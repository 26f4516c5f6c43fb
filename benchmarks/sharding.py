"""Time of an update by the trainer `fsdp` against the trainer `deepspeed` in stage 3, on ranks of this machine.

    .venv/bin/python benchmarks/sharding.py [--ranks 2] [--repeats 15] [--dtype fp32] [--storage fp32] [--result FILE]

All trainers live in the same processes and take turns with the same micro-batches; medians. Prints one JSON object.
With several storages (`--dtype bf16 --storage fp32 bf16`) each trainer is measured with each.
Each rank has one thread. On a machine that other processes use too, only processor seconds are meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from settings import SIZES, median

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for tests.support

UNITS = 32
TRAINERS = {"fsdp": {}, "deepspeed": {"stage": 3, "keep_whole": 0}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--storage", default=["fp32"], choices=["fp32", "bf16"], nargs="+")
    parser.add_argument("--result", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        from rlhf_testing.tiny import tiny_model

        tiny_model(Path(folder) / "model", **SIZES)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        words = [
            sys.executable,
            __file__,
            folder,
            str(arguments.ranks),
            str(port),
            arguments.dtype,
            ",".join(arguments.storage),
            str(arguments.repeats),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        ranks = [
            subprocess.Popen([*words, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(arguments.ranks)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    seconds = json.loads(outputs[0].splitlines()[-1])
    wall, processor = (
        {name: median(samples[kind]) for name, samples in seconds.items()} for kind in ("wall", "processor")
    )
    ratios: dict[str, dict[str, float]] = {}
    for quantity, times in (("wall", wall), ("processor", processor)):
        first = arguments.storage[0]
        ratios[quantity] = {
            f"fsdp / deepspeed, {s}": times[f"fsdp {s}"] / times[f"deepspeed {s}"] for s in arguments.storage
        }
        for s in arguments.storage[1:]:
            ratios[quantity] |= {
                f"{s} / {first}, {name}": times[f"{name} {s}"] / times[f"{name} {first}"] for name in TRAINERS
            }
    result: dict[str, Any] = {
        "ranks": arguments.ranks,
        "dtype": arguments.dtype,
        "wall": wall,
        "processor": processor,
        "ratio": ratios,
        "seconds": seconds,
    }
    if arguments.result:
        arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "seconds"}))


def rank(folder: str, ranks: str, port: str, dtype: str, storages: str, repeats: str, number: str) -> None:
    """The updates of one rank; the last line that it prints is {trainer and storage: {wall, processor: seconds of
    each}}."""
    from rlhf.plugins import Plugins
    from rlhf_testing.suite_losses import TokenLoss

    from tests.support.rank_batches import batch, shares, spec

    micros = shares(batch(0, units=UNITS), int(ranks), budget=256)[int(number)]
    trainers, seconds = {}, {}
    for storage in storages.split(","):
        model_spec = spec(Path(folder), int(number), int(ranks), port, dtype=dtype, storage=storage)
        for name, options in TRAINERS.items():
            trainer = Plugins.discover().resolve("trainer", name).cls
            trainers[f"{name} {storage}"] = trainer(trainer.Config(lr=1e-6, device="cpu", **options), model_spec)
            seconds[f"{name} {storage}"] = {"wall": [], "processor": []}
    for repeat in range(int(repeats) + 2):
        for name, trainer in trainers.items():
            start, used = time.perf_counter(), time.process_time()
            trainer.update(micros, TokenLoss(), {}, {})
            if repeat >= 2:
                seconds[name]["wall"].append(time.perf_counter() - start)
                seconds[name]["processor"].append(time.process_time() - used)
    print(json.dumps(seconds), flush=True)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 8 and not sys.argv[1].startswith("-"):
        rank(*sys.argv[1:])
    else:
        main()
