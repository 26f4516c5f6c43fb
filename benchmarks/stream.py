"""Samples a second of a continuous stream compared with waves, on the simulated runtime: engines, training and
environments take the time that they are told, and the controller is the real one.

    python benchmarks/stream.py [--output results/NAME.json]
    python benchmarks/stream.py --in-flight [--output results/NAME.json]
    python benchmarks/stream.py --scale [--batch 2500] [--output results/NAME.json]

The environment answers after a log-normal delay of 0.5 s on average, one in a hundred after 5 s. An episode has 4
turns. All times are simulated seconds.

``--in-flight``: what new weights do to unfinished answers, with answers of 10 to 1,000 tokens.

``--scale``: what the controller costs with 1,000 engines of 128 slots. Batches are of ``--batch`` groups of 8 samples,
and five of them are under way at once: 100,000 samples in one process. An answer of 200 tokens takes 100 s, without
speed-up. The run's record must show that each group was trained on once and that no token was too old.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import feather
from rlhf.types import GenerationRequest, Turn
from rlhf_cli.main import main as rlhf
from rlhf_plugin_simulated.pool import SimulatedPool
from rlhf_runtime.output.metrics import read_metrics
from rlhf_testing.tiny import tiny_model

SPEED = 10.0
"""Simulated seconds per second."""
STEPS, WARM_UP, ENDING = 20, 4, 5
"""Steps of a run, those that are not measured, and those at its end, whose idle time is not counted: no further prompts
are drawn for them."""
BATCH, SAMPLES = 16, 4
WORKLOADS: dict[str, dict[str, Any]] = {
    "delays, learning 2 s": {"trainer": 2.0, "tokens": 40.0},
    "delays, learning 8 s": {"trainer": 8.0, "tokens": 40.0},
    "no delays, long answers, learning 8 s": {"trainer": 8.0, "tokens": 400.0, "env": False},
}
STREAMS: dict[str, list[str]] = {
    "waves": ["--stream.mode", "waves"],
    "continuous, submission, staleness 1": ["--stream.mode", "continuous", "--stream.staleness", "1"],
    "continuous, submission, staleness 4": ["--stream.mode", "continuous", "--stream.staleness", "4"],
    "continuous, completion, staleness 4": [
        *["--stream.mode", "continuous", "--stream.staleness", "4", "--stream.order", "completion"],
    ],
}
IN_FLIGHT_WORKLOADS: dict[str, dict[str, Any]] = {
    "answers of 10 to 1,000 tokens, learning 2 s": {"trainer": 2.0, "tokens": 250.0, "sigma": 1.1, "env": False},
}
IN_FLIGHT_STREAMS = {
    f"{mode}, staleness {age}": [*STREAMS[f"continuous, submission, staleness {age}"], "--sync.in_flight", mode]
    for age in (1, 4)
    for mode in ("drain", "continue", "restart")
}


def arguments(folder: Path, workload: dict[str, Any], stream: list[str]) -> list[str]:
    speed = str(SPEED)
    common = {
        "algo": "grpo",
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "backend": "simulated",
        "trainer.speed": speed,
        "trainer.seconds": workload["trainer"],
        "generator.speed": speed,
        "generator.tokens": workload["tokens"],
        "generator.tokens_sigma": workload.get("sigma", 0.5),
        "generator.engines": 4,
        "generator.slots": 256,
        "sampling.samples_per_prompt": SAMPLES,
        "sampling.max_new_tokens": 1000 if "sigma" in workload else 2000,
        "data.batch_size": BATCH,
        "data.max_tokens": 20000,
        "run.steps": STEPS,
        "run.output": folder / "run",
        "checkpoint.save_rollouts": "false",
    }
    if workload.get("env", True):
        common |= {"rollout.use": "multi_turn", "env.use": "simulated", "env.slow_share": 0.01, "env.speed": speed}
    else:
        common |= {"reward": "length", "reward.length.high": 100000}
    flags = [str(word) for name, value in common.items() for word in (f"--{name}", value)]
    return ["train", *flags, "--run.overwrite", *stream]


def measure(folder: Path, workload: dict[str, Any], stream: list[str]) -> dict[str, Any]:
    """Means over the steps after the warm-up. In waves the idle time of engines is not known."""
    code = rlhf(arguments(folder, workload, stream))
    if code:
        raise SystemExit(code)
    lines = read_metrics(folder / "run" / "metrics.jsonl")[WARM_UP:]
    step = statistics.fmean(line["time/step"] for line in lines) * SPEED
    idle = [line["stream/idle"] for line in lines[:-ENDING] if "stream/idle" in line]
    return {
        "step [s]": step,
        "waiting for samples [s]": statistics.fmean(line["time/generate"] for line in lines) * SPEED,
        "samples a second": BATCH * SAMPLES / step,
        "age, median": statistics.fmean(line.get("stream/age", 0.0) for line in lines),
        "engines idle": statistics.fmean(idle) if idle else None,
    }


STALENESS, SCALE_STEPS, SCALE_SAMPLES = 4, 7, 8


@dataclass
class Requests:
    """Counts the requests that the generator is answering."""

    now: int = 0
    most: int = 0
    answered: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    """Processor seconds of the process at the first request, as ``wall`` is elapsed seconds."""

    def watch(self) -> None:
        answer = SimulatedPool.answer

        async def count_request(generator: SimulatedPool, request: GenerationRequest) -> Turn:
            if not self.wall:
                self.wall, self.cpu = time.perf_counter(), time.process_time()
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                return await answer(generator, request)
            finally:
                self.now -= 1
                self.answered += 1

        SimulatedPool.answer = count_request


def measure_scale(folder: Path, batch: int) -> dict[str, float]:
    """A run of :data:`SCALE_STEPS` steps."""
    values = {
        "algo": "grpo",
        "model": folder / "model",
        "data": folder / "data.jsonl",
        "backend": "simulated",
        "trainer.seconds": 1.0,
        "generator.tokens": 200.0,
        "generator.tokens_sigma": 0.1,
        "generator.tokens_per_second": 2.0,
        "generator.engines": 1000,
        "generator.slots": 128,
        "sampling.samples_per_prompt": SCALE_SAMPLES,
        "sampling.max_new_tokens": 400,
        "data.batch_size": batch,
        "data.max_tokens": 1000,
        "run.steps": SCALE_STEPS,
        "run.output": folder / "run",
        "reward": "length",
        "reward.length.high": 100000,
        "stream.mode": "continuous",
        "stream.staleness": STALENESS,
    }
    requests, base = Requests(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    requests.watch()
    flags = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    if code := rlhf(["train", *flags]):
        raise SystemExit(code)
    cpu, wall = time.process_time() - requests.cpu, time.perf_counter() - requests.wall
    trained = check_record(folder / "run", batch)
    return {
        "most samples under way": requests.most,
        "samples answered": requests.answered,
        "samples trained on": trained,
        "seconds": wall,
        "samples a second": trained / wall,
        "processor microseconds a sample": cpu / trained * 1e6,
        "peak memory [MiB]": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "memory before the run [MiB]": base / 1024,
    }


def check_record(run: Path, batch: int) -> int:
    """Each group was trained on once, each prompt drawn was trained on or counted, and no token is too old. Returns the
    number of samples."""
    lines, samples = read_metrics(run / "metrics.jsonl"), 0
    counts: Counter[int] = Counter()
    for step, path in enumerate(sorted((run / "rollouts").glob("*.arrow"))):
        table = feather.read_table(path, columns=["group", "turns"])
        counts.update(set(table["group"].to_pylist()))
        samples += table.num_rows
        turns = table["turns"].combine_chunks().flatten()
        versions = turns.field("versions").flatten().flatten().to_numpy()[1::2]
        assert len(versions) >= table.num_rows
        assert step - versions.min() <= STALENESS, (step, versions.min())
    left_out = sum(line[f"stream/{name}"] for line in lines for name in ("filtered", "failed_groups"))
    assert len(lines) == SCALE_STEPS
    assert set(counts.values()) == {1}, "a group was trained on twice"
    assert len(counts) == batch * SCALE_STEPS
    assert sum(line["stream/prompts"] for line in lines) == len(counts) + left_out, "a prompt was lost"
    return samples


def machine() -> dict[str, Any]:
    name = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "processor": name.split(":")[1].strip(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", action="store_true", help="drain, continue and restart in place of the streams")
    parser.add_argument("--scale", action="store_true", help="a thousand engines in place of the comparison")
    parser.add_argument("--batch", type=int, default=2500, help="groups of a batch, with --scale")
    parser.add_argument("--output", type=Path, help="also write the figures here, as JSON")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model(folder / "model", hidden=16, heads=2, kv_heads=1)
        count = options.batch * SCALE_STEPS if options.scale else 2000
        rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(count)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if options.scale:
            load = os.getloadavg()[0]
            scale = measure_scale(folder, options.batch)
            print("\n".join(f"{name:32} {value:12,.1f}" for name, value in scale.items()))
            if options.output is not None:
                text = json.dumps({"scale": scale, "machine": machine() | {"load_before": load}}, indent=1)
                options.output.write_text(text + "\n", encoding="utf-8")
            return
        compared = (IN_FLIGHT_WORKLOADS, IN_FLIGHT_STREAMS) if options.in_flight else (WORKLOADS, STREAMS)
        for title, workload in compared[0].items():
            results[title] = {stream: measure(folder, workload, flags) for stream, flags in compared[1].items()}
    for title, streams in results.items():
        first = next(iter(streams.values()))["samples a second"]
        print(f"\n{title}\n\n| stream | step | waiting | samples a second | ratio | age | idle |")
        print("|---|---|---|---|---|---|---|")
        for stream, figures in streams.items():
            step, waiting, rate, age, idle = figures.values()
            ratio, share = rate / first, "" if idle is None else f"{idle:.1%}"
            print(f"| {stream} | {step:.1f} s | {waiting:.1f} s | {rate:.1f} | {ratio:.2f} | {age:.1f} | {share} |")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
