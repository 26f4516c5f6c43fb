"""Overhead of the launchers ``ray`` and ``processes`` per step: all work except the models', in a policy-gradient step
of 16 x 8 samples.

The trainer and the generator of this file return at once, with tensors and turns of realistic sizes. Everything else is
the real code: roles that split batches and join results, calls, the weight sync with its proof, and the pool of
engines. The same step runs in one process (launcher ``local``), so the difference is the overhead.

    python benchmarks/ray_overhead.py [--steps 50] [--ranks 1] [--engines 1] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.actor import ActorMethod
from rlhf.interfaces import (
    GENERATOR,
    ApplyResult,
    GeneratorSpec,
    Launcher,
    Loss,
    ModelSpec,
    Place,
    TakesTensors,
    TrainerFacts,
)
from rlhf.interfaces.generator import Generator, Proof
from rlhf.ops.batch import Batch
from rlhf.ops.heads import resolve_head
from rlhf.ops.packing import SequenceData, UnitData, pack
from rlhf.ops.reduce import weigh
from rlhf.plugins import Plugins
from rlhf.types import GenerationRequest, LossOutput, Reduce, RoleSpec, Sampling, Turn, Update
from rlhf_runtime.config.sections import SyncSection
from rlhf_runtime.models.roles import Role
from rlhf_runtime.models.weight_sync import WeightSync
from rlhf_testing.launcher import CountingTrainer
from rlhf_workers.driver.watchdog import Watchdog

PROMPTS, SAMPLES, PROMPT, ANSWER = 16, 8, 6, 64
BUDGET = 2048
"""Tokens of a micro-batch."""
WEIGHTS = 1_000_000
"""Parameters that are sent, in one bucket. The time to send the bytes counts as model work; the calls do not."""
WARM_UP = 5


class EchoTrainer(CountingTrainer):
    """Returns outputs of the right shapes without computing."""

    def facts(self) -> TrainerFacts:
        return TrainerFacts((1,), 100)

    def forward(self, micros: Sequence[Batch], outputs: Sequence[Any], view: str = "live") -> list[dict[str, Any]]:
        return [{h.name: torch.zeros(len(m.ids_N)) for h in outputs} for m in micros]

    def update(self, micros: Any, loss: Any, coef: Mapping[str, float], live: Mapping[str, str]) -> Any:
        return {f"metric_{n}": (1.0, 1.0) for n in range(8)}, ApplyResult(1.0, 1e-6)

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Any]]:
        return iter([("weight", torch.zeros(WEIGHTS))])


class EchoGenerator(TakesTensors, Generator):
    """Returns the same answer to every request without computing."""

    name = "echo"
    capabilities = frozenset({"logprobs", "seeds"})

    def __init__(self, config: Any, spec: GeneratorSpec) -> None:
        self.version = 0

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        for n in range(len(requests)):
            yield n, Turn([7] * ANSWER, True, [-1.5] * ANSWER, ((0, self.version),), "stop", text="x" * ANSWER)

    def begin_load(self, version: int) -> None:
        self.version, self.got = version, {}

    def take(self, bucket: Any) -> None:
        self.got |= bucket.received()

    def end_load(self) -> list[Proof]:
        return [Proof(self.version, received=self.got)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return [[[0.0] * (len(s) - 1) for s in sequences]]


class PolicyLoss(Loss):
    """Reads the same columns as a clipped policy loss with a reference."""

    name = "echo"

    def outputs(self) -> tuple[str, ...]:
        return ("logprobs",)

    def columns(self) -> tuple[str, ...]:
        return ("old_logprobs", "ref_logprobs", "advantage")

    def reduce(self) -> dict[str, Reduce]:
        return {"policy": Reduce("token_mean")}

    def __call__(self, x: Any) -> LossOutput:
        raise NotImplementedError


def the_batch() -> Batch:
    tokens = PROMPT + ANSWER
    mask = [n >= PROMPT for n in range(tokens)]
    columns = {name: [0.5] * tokens for name in ("old_logprobs", "ref_logprobs", "advantage", "temperature")}
    unit = UnitData([SequenceData([7] * tokens, {"loss_mask": mask, **columns})])
    return weigh(pack([unit] * (PROMPTS * SAMPLES)), PolicyLoss().reduce())


class Step:
    """The calls of one step."""

    def __init__(self, launcher: Launcher, ranks: int, engines: int) -> None:
        shared = {"reference": Place(ranks, share="policy")}
        launcher.place({"policy": Place(ranks), **shared, GENERATOR: Place(engines)})
        self.roles = {}
        for name in ("policy", "reference"):
            spec = ModelSpec(RoleSpec(name, trained=name == "policy"), "", world_size=ranks)
            self.roles[name] = Role(spec, launcher.launch_trainer(EchoTrainer, None, spec), BUDGET)
        self.generator = launcher.launch_generator(EchoGenerator, None, GeneratorSpec((1,), str))
        self.sync = WeightSync(self.roles["policy"], self.generator, SyncSection(), 0, print)
        self.batch, self.loss, self.heads = the_batch(), PolicyLoss(), [resolve_head("logprobs", None)]
        prompts = [(n,) * PROMPT for n in range(PROMPTS)]
        sampling = Sampling(ANSWER)
        self.requests = [GenerationRequest(p, n, sampling) for p in prompts for n in range(SAMPLES)]
        self.version = 0

    def parts(self) -> dict[str, Callable[[], Any]]:
        policy, reference = self.roles["policy"], self.roles["reference"]
        return {
            "generate": lambda: list(self.generator.generate(self.requests)),
            "old log-probs": lambda: policy.forward(self.batch, self.heads),
            "reference log-probs": lambda: reference.forward(self.batch, self.heads),
            "update": lambda: policy.update(self.batch, self.loss, Update("policy", "loss")),
            "sync": self._push,
        }

    def _push(self) -> None:
        self.version += 1
        self.sync.push(self.version)


def measure(step: Step, steps: int) -> dict[str, float]:
    """Median milliseconds of each part."""
    times: dict[str, list[float]] = {name: [] for name in step.parts()}
    for _ in range(WARM_UP + steps):
        for name, part in step.parts().items():
            start = time.perf_counter()
            part()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}


def round_trips(step: Step) -> dict[str, dict[str, int]]:
    """For each part: calls of actors' methods, and how often the driver waits for an answer. Unlike times, these counts
    do not depend on other load of the machine."""
    result: dict[str, dict[str, int]] = {}
    send, wait = ActorMethod._remote, Watchdog.wait
    for name, part in step.parts().items():
        counts = result[name] = {"calls": 0, "waits": 0}

        def count_calls(self: Any, *args: Any, counts: dict[str, int] = counts, **options: Any) -> Any:
            counts["calls"] += 1
            return send(self, *args, **options)

        def waited(self: Any, *args: Any, counts: dict[str, int] = counts) -> Any:
            counts["waits"] += 1
            return wait(self, *args)

        ActorMethod._remote, Watchdog.wait = count_calls, waited
        try:
            part()
        finally:
            ActorMethod._remote, Watchdog.wait = send, wait
    return result


def transfers(step: Step) -> dict[str, dict[str, int]]:
    """For the calls that carry a batch: puts, bytes in the store, and bytes of the columns that the call declares."""
    result: dict[str, dict[str, int]] = {}
    put = ray.put
    for name in ("old log-probs", "update"):
        sizes: list[int] = []

        def measure_put(value: Any, sizes: list[int] = sizes) -> Any:
            ref = put(value)
            sizes.append(ray.experimental.get_local_object_locations([ref])[ref]["object_size"])
            return ref

        ray.put = measure_put
        step.parts()[name]()
        ray.put = put
        micros = step.roles["policy"]._shares(step.batch, step.loss) if name == "update" else None
        slim = (
            [step.batch.select_columns(["temperature", "loss_mask"])]
            if micros is None
            else [m for r in micros for m in r]
        )
        columns = sum(
            t.nbytes
            for m in slim
            for t in (m.ids_N, m.lens_B, m.unit_B, m.role_B, *m.tok.values(), *m.seq.values(), *m.unit.values())
        )
        result[name] = {"puts": len(sizes), "bytes_put": sum(sizes), "bytes_of_columns": columns}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    load, plugins = os.getloadavg()[0], Plugins.discover()
    local = plugins.resolve("launcher", "local").cls()
    in_one_process = measure(Step(local, 1, 1), options.steps)
    cls = plugins.resolve("launcher", "processes").cls
    launcher = cls(cls.Config(cpus=options.ranks + options.engines))
    try:
        in_processes = measure(Step(launcher, options.ranks, options.engines), options.steps)
    finally:
        launcher.shutdown()
    cls = plugins.resolve("launcher", "ray").cls
    launcher = cls(cls.Config(cpus=options.ranks + options.engines, object_store_gib=0.5))
    try:
        step = Step(launcher, options.ranks, options.engines)
        with_ray = measure(step, options.steps)
        carried, trips = transfers(step), round_trips(step)
    finally:
        launcher.shutdown()
    for name in with_ray:
        row = f"{with_ray[name]:7.2f} ms on Ray, {in_processes[name]:7.2f} ms in processes"
        print(f"{name:20} {row}, {in_one_process[name]:7.2f} ms in one process")
    total, process_total, base = sum(with_ray.values()), sum(in_processes.values()), sum(in_one_process.values())
    print(f"{'step':20} {total:7.2f} ms on Ray, {process_total:7.2f} ms in processes, {base:7.2f} ms in one process")
    print(
        f"Ray costs {total - base:.1f} ms, processes {process_total - base:.1f} ms; a step takes "
        f"{process_total / total:.2f} x Ray's"
    )
    for name, counts in trips.items():
        print(f"{name}: {counts['calls']} calls, waits for {counts['waits']} answers")
    for name, sizes in carried.items():
        share = sizes["bytes_put"] / sizes["bytes_of_columns"]
        print(f"{name}: {sizes['puts']} put of {sizes['bytes_put']} bytes, {share:.2f} x the columns")
    result = {
        "shape": {"prompts": PROMPTS, "samples": SAMPLES, "prompt": PROMPT, "answer": ANSWER, "weights": WEIGHTS},
        "ranks": options.ranks,
        "engines": options.engines,
        "steps": options.steps,
        "milliseconds_on_ray": with_ray,
        "milliseconds_in_processes": in_processes,
        "milliseconds_in_one_process": in_one_process,
        "step_milliseconds_on_ray": total,
        "step_milliseconds_in_processes": process_total,
        "step_milliseconds_in_one_process": base,
        "transfers": carried,
        "round_trips": trips,
        "machine": {"cpus": os.cpu_count(), "load_before": load, "python": platform.python_version()},
        "versions": {"ray": ray.__version__, "torch": torch.__version__},
    }
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
