"""GRPO and SFT, whole steps of ours and of TRL in turns: the workloads of ``make bench`` at a 0.5B-class shape.

Ours runs with its defaults, TRL with Liger and the options that make it fastest (:data:`PACKED`, :data:`ENGINE`), then
both without vLLM, and TRL without packing. One process of each imports its packages once and makes some steps when
it is told to (../turns.py). Before anything is timed, both must compute the same gradients on the same batches, TRL
with each of its options.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import machine
import shapes
from parts import NotRun, Part, Section

BENCHMARKS = Path(__file__).resolve().parents[1]
LARGE: dict[str, Any] = {
    "PROMPTS": 16,
    "SAMPLES": 8,
    "MAX_NEW_TOKENS": 128,
    "ROWS": 16,
    "SHORTEST": 64,
    "LONGEST": 1024,
}
TINY: dict[str, Any] = {"PROMPTS": 2, "SAMPLES": 2, "MAX_NEW_TOKENS": 8, "ROWS": 4, "SHORTEST": 20, "LONGEST": 200}

PACKED: dict[str, Any] = {"packing": True}
"""Of TRL's config for SFT."""
ENGINE: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.15,
    "vllm_max_model_length": 256,
    "vllm_importance_sampling_correction": False,
}
"""Of TRL's config for GRPO. The correction needs a forward pass more, and ours does without by default, too. The engine
stays awake, which is faster: a GPU that needs this benchmark holds both."""
OWN_ENGINE: dict[str, Any] = {"use": "vllm", "kv_cache_gib": 1.0}
"""Of our run file. As in TRL it is in the trainer's process and stays awake."""
COMPILED = 420.0
"""Seconds that must be left for compiled engines, which are the default of both sides: each may take over 100 s to
start. With less time both are uncompiled."""
RESERVE = 15.0
"""Seconds that must be left for a turn after the first timed one."""

GATE_CUDA = 1e-4
"""Largest distance of the gradients of ours and TRL in fp32, relative to their norm. It is 1e-5 on a processor, where
attention has the same precision in both. On a GPU torch uses other kernels for padded rows than for packed ones."""
GATE_BF16 = 5e-2
"""The same for TRL in bf16 and ours in fp32: the bound of ``equality``. Flash attention has no fp32."""
FIRST = 2e-2
"""Largest relative difference of the first loss and gradient norm of SFT in bf16, as in ../real.py."""


@dataclass(frozen=True)
class Comparison:
    """A part: a workload with ours and with TRL."""

    name: str
    workload: str
    trl: Mapping[str, Any] = field(default_factory=dict)
    """Fields of TRL's config."""
    seconds: float = 20.0
    """The time that it needs at least."""

    @property
    def vllm(self) -> bool:
        """Whether both sides sample with it."""
        return "use_vllm" in self.trl


COMPARISONS = (
    Comparison("sft", "sft", PACKED),
    Comparison("grpo-forced", "grpo-forced", ENGINE, seconds=60.0),
    Comparison("grpo-natural", "grpo-natural", ENGINE),
    Comparison("grpo-forced, without vllm", "grpo-forced"),
    Comparison("grpo-natural, without vllm", "grpo-natural"),
    Comparison("sft, TRL's rows padded", "sft"),
)
"""In the order of their worth."""


def run(section: Section) -> None:
    os.environ |= {"BENCH_THREADS": str(_threads()), "OMP_NUM_THREADS": str(_threads())}
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    bench = _bench()
    import model  # with the settings of make bench, for the gate

    _settings(section.small)
    gate_folder, folder = section.work / "gate", section.work / "arms"
    arms = Arms(section, bench, folder)
    with ThreadPoolExecutor(1) as pool, arms:  # all processes of this section import at the same time
        files = pool.submit(bench.execute, sys.executable, "model.py", str(folder), "--without-pairs")
        if section.device == "cuda":
            section.part("rates", partial(rates, section))
        gate_folder.mkdir()
        model.make_model(gate_folder / "model")
        model.make_data(gate_folder)
        model.make_gate(gate_folder)
        section.part("the same gradients as TRL", partial(arms.gate, gate_folder), seconds=20)
        section.part("model and data", lambda _: files.result(), seconds=5)
        for comparison in COMPARISONS:
            run_it = partial(arms.compare, comparison)
            needs = ("vllm",) if comparison.vllm else ()
            section.part(comparison.name, run_it, needs=needs, seconds=comparison.seconds)


def rates(section: Section, part: Part) -> None:
    import torch

    part.figures["bf16 products, operations per second"] = machine.product_rate(section.device, torch.bfloat16)
    part.figures["fp32 products, operations per second"] = machine.product_rate(section.device, torch.float32, 4096)
    part.figures["copy, bytes per second"] = machine.copy_rate(section.device)


class Worker:
    """A process of ours or of TRL (../turns.py)."""

    def __init__(self, who: str, python: Path, log: Path) -> None:
        self.log = log
        self.connection, child = Pipe()
        command = [str(python), str(BENCHMARKS / "turns.py"), who, str(child.fileno())]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, pass_fds=[child.fileno()])
        child.close()  # its end is then noticed

    def ask(self, message: Any, seconds: float) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises RuntimeError where the process failed, ended or is late."""
        try:
            self.connection.send(message)
            if not self.connection.poll(max(seconds, 0.0)):
                raise RuntimeError(f"no answer after {seconds:.0f} s: {self.end()}")
            answer: dict[str, Any] = self.connection.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"the process ended: {self.end()}") from error
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def end(self) -> str:
        """The end of what it printed. Where it waits for a job it ends by itself, and removes its files."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.process.kill()
        self.process.wait()
        return self.log.read_text(errors="replace")[-3000:]


class Arms:
    """The two processes, and the parts that they work for."""

    def __init__(self, section: Section, bench: Any, folder: Path) -> None:
        self.section, self.bench, self.folder = section, bench, folder
        self.workers: dict[str, Worker] = {}
        self.turns, self.steps = (1, (1, 1)) if section.small else (3, (1, 2))
        """Turns of each side after the first, which is not timed; steps of a turn: not timed, timed."""
        self.eager = section.small or section.left < COMPILED
        self.missing = missing_for_trl(section.trl_python)
        self.no_trl = next((reason for name, reason in self.missing.items() if name not in OPTIONAL), "")
        """Why TRL cannot be run; empty where it can."""

    def __enter__(self) -> None:
        for side in ("ours",) if self.no_trl else ("ours", "trl"):
            self.worker(side)

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.end()

    def worker(self, who: str) -> Worker:
        """The process of ``ours`` or ``trl``; a new one if it ended."""
        if who not in self.workers or self.workers[who].process.poll() is not None:
            python = self.section.trl_python if who == "trl" else Path(sys.executable)
            self.workers[who] = Worker(who, python, self.section.work / f"{who}.log")
        return self.workers[who]

    def ask(self, who: str, message: Any) -> dict[str, Any]:
        return self.worker(who).ask(message, self.section.left - 3)

    def fastest(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """(arguments of a job of TRL with these options and the kernels that suit them, {what it is without: why})."""
        obstacle = "it needs a GPU" if self.section.device != "cuda" else ""
        omissions = {"Liger": obstacle or self.missing.get("liger_kernel", ""), "flash attention": obstacle}
        job: dict[str, Any] = {"options": dict(options)}
        if not omissions["Liger"]:
            job["options"]["use_liger_kernel"] = True
        if "packing" not in options:
            del omissions["flash attention"]
        elif not obstacle:
            job["attention"] = "flash"
        return job, {name: reason for name, reason in omissions.items() if reason}

    def gate(self, folder: Path, part: Part) -> None:
        """At the tiny shape of ``make bench``, on the device: our gradients in fp32 beside those of TRL as it is, and
        with its options."""
        if self.no_trl:
            raise NotRun(self.no_trl)
        exact = self.bench.TOLERANCE if self.section.device == "cpu" else GATE_CUDA
        packed, _ = self.fastest(PACKED)
        flash = packed.pop("attention", None)
        liger = {"options": {name: x for name, x in packed["options"].items() if name not in PACKED}}
        cases = [("grpo", {}, exact), ("sft", {}, exact), ("sft", packed, exact)]
        cases += [("grpo", liger, exact)] if liger["options"] else []
        cases += [("sft", packed | {"attention": flash, "precision": "bf16"}, GATE_BF16)] if flash else []
        job = {"gate": True, "work": str(folder)}
        for workload in ("grpo", "sft"):
            self.ask("ours", job | {"workload": workload})
        for workload, options, limit in cases:
            self.ask("trl", job | {"workload": workload} | options)
            name = ", ".join([workload, *options.get("options", ()), *filter(None, [options.get("attention")])])
            distance = self.bench.distance(folder, workload)
            part.figures[f"{name}: gradients apart"] = distance
            part.at_most(f"{name}: gradients of ours and TRL apart", distance, limit)

    def compare(self, comparison: Comparison, part: Part) -> None:
        """Turns of ours and TRL, as many as the time allows. A side that fails leaves the other one's figures."""
        if not (self.folder / "prompts.jsonl").exists():
            raise NotRun("there is no model to train")
        job = {"gate": False, "work": str(self.folder), "workload": comparison.workload, "precision": "bf16"}
        jobs = {"ours": job}
        reason = self.no_trl or (self.missing.get("vllm", "") if comparison.vllm else "")
        if reason:
            part.figures["TRL is not run"] = reason
        else:
            fastest, omissions = self.fastest(comparison.trl)
            jobs["trl"] = job | fastest
            part.figures |= {"TRL": fastest, "TRL without": omissions}
        if comparison.vllm:
            part.figures["engines"] = "uncompiled" if self.eager else "compiled"
            jobs["ours"] = job | {"options": {"generator": OWN_ENGINE}}
            jobs = {side: arguments | {"eager": self.eager} for side, arguments in jobs.items()}
        results = part.figures["arms"] = self.timed(jobs, part)
        part.figures |= self.summary(results)
        part.holds("each side was timed", all(results.get(side, {}).get("seconds") for side in jobs))
        if comparison.workload == "sft" and len(results) == 2:
            self.same_work(results, part)

    def timed(self, jobs: Mapping[str, dict[str, Any]], part: Part) -> dict[str, Any]:
        """{side: its result}, of the sides that did not fail. One is built after the other, because an engine counts
        the memory that others take while it starts."""
        results: dict[str, Any] = {}
        errors = part.figures["errors"] = {}
        turns = [(2, 0), *[self.steps] * self.turns]
        for number, message in enumerate(("job", *turns, (0, 0))):
            if 2 < number <= len(turns) and self.section.left < RESERVE:
                part.figures["turns left out for want of time"] = True
                continue
            for side in [side for side in jobs if side not in errors]:
                try:
                    results[side] = self.ask(side, jobs[side] if message == "job" else message)
                except RuntimeError as error:
                    errors[side] = str(error)
        return {side: result for side, result in results.items() if side not in errors}

    def same_work(self, results: Mapping[str, Any], part: Part) -> None:
        """Of SFT, where both learn from the same rows in every step."""
        rlhf, trl = results["ours"], results["trl"]
        part.holds("the tokens of all steps are equal", {*rlhf["tokens"]} == {*trl["tokens"]})
        for name, value in trl["first"].items():
            part.at_most(f"first {name} of ours and TRL apart", abs(rlhf["first"][name] / value - 1), FIRST)

    def summary(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Medians over the timed steps; the share of the device's rate is of forward and backward only."""
        report, figures = self.bench.report, {}
        rate = self.section.parts.get("rates", {}).get("figures", {}).get("bf16 products, operations per second")
        for side, result in results.items():
            figures[f"{side}, tokens per second"] = report.throughput([result])
            figures[f"{side}, seconds"] = report.median(result["seconds"])
            figures[f"{side}, tokens"] = report.median(result["tokens"])
            if "peak_device_mib" in result:
                figures[f"{side}, peak device MiB"] = result["peak_device_mib"]
            if "phases" in result:
                figures[f"{side}, phases"] = report.phases([result], rate or float("nan"))
        if len(results) == 2:
            figures["ours / trl"] = figures["ours, tokens per second"] / figures["trl, tokens per second"]
        return figures


OPTIONAL = ("vllm", "liger_kernel")
"""Packages that TRL can do without."""


@cache
def missing_for_trl(python: Path) -> dict[str, str]:
    """{package: why it cannot be used}."""
    names = ("trl", "accelerate", "datasets", "transformers", "torch", *OPTIONAL)
    ask = f"import importlib.util as u; print(*(n for n in {names!r} if u.find_spec(n) is None))"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    except OSError as error:
        return {"trl": f"there is no Python for TRL: {error}"}
    if done.returncode:
        return {"trl": f"{python} does not run: {done.stderr.strip()[-300:]}"}
    return {name: f"{name} is not installed for {python}" for name in done.stdout.split()}


def _settings(small: bool) -> None:
    """For the scripts that are started from now on."""
    shape, tokens = shapes.sizes(small)
    changes = {"SIZES": shape, "VOCABULARY": tokens, **(TINY if small else LARGE)}
    os.environ["BENCH_SETTINGS"] = json.dumps(changes)


def _bench() -> Any:
    """``benchmarks/run.py``, whose name is also that of the script beside this one."""
    spec = importlib.util.spec_from_file_location("bench_run", BENCHMARKS / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _threads() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0))))
