"""What a sandbox costs the reward ``code``, compared with a plain process of the same interpreter.

    python benchmarks/code_sandbox.py [--programs 60] [--work 0 0.2] [--output FILE.json]

Two figures for programs of each amount of processor time: the seconds of one program alone (median), and how many
programs a second are run when as many run at once as there are processors. Plain processes and sandboxes alternate in
rounds of ten programs. ``ratio`` divides a sandbox's rate by that of the plain processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rlhf_plugin_code.interpreter import ENVIRONMENT, interpreter
from rlhf_plugin_code.limits import MIB, ProgramLimits
from rlhf_plugin_code.sandbox_launcher import SandboxLauncher

ROUND = 10
PROGRAM = "import time\nwhile time.process_time() < {work}: pass\nprint(input())"
One = Callable[[str], Awaitable[None]]


def plain() -> One:
    command = interpreter(None).command

    def run(program: str) -> None:
        done = subprocess.run([*command, "-c", program], input=b"1\n", env=ENVIRONMENT, capture_output=True, check=True)
        assert done.stdout == b"1\n"

    async def execute(program: str) -> None:
        await asyncio.to_thread(run, program)

    return execute


def sandboxed(launcher: SandboxLauncher) -> One:
    async def execute(program: str) -> None:
        finished = await launcher.run(program, "1\n")
        assert finished.out == "1\n", finished

    return execute


async def measure(ways: dict[str, One], work: float, programs: int) -> dict[str, dict[str, float]]:
    cores = len(os.sched_getaffinity(0))
    latencies: dict[str, list[float]] = {name: [] for name in ways}
    throughputs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(1, programs // ROUND)):
        for name, execute in ways.items():
            text = PROGRAM.format(work=work)
            for _ in range(ROUND):
                begin = time.perf_counter()
                await execute(text)
                latencies[name].append(time.perf_counter() - begin)
            free = asyncio.Semaphore(cores)

            async def limited(execute: One = execute, free: asyncio.Semaphore = free, text: str = text) -> None:
                async with free:
                    await execute(text)

            begin = time.perf_counter()
            await asyncio.gather(*(limited() for _ in range(ROUND * cores)))
            throughputs[name].append(ROUND * cores / (time.perf_counter() - begin))
    rates = {name: statistics.median(values) for name, values in throughputs.items()}
    return {
        name: {
            "work_ms": 1e3 * work,
            "alone_ms": round(1e3 * statistics.median(latencies[name]), 2),
            "above_plain_ms": round(
                1e3 * (statistics.median(latencies[name]) - statistics.median(latencies["plain"])), 2
            ),
            "per_second": round(rates[name], 1),
            "ratio": round(rates[name] / rates["plain"], 3),
        }
        for name in ways
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=60, help="programs of each kind")
    parser.add_argument("--work", type=float, nargs="+", default=[0.0, 0.2], help="seconds of processor time")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    limits = ProgramLimits(cpu_seconds=20, wall_seconds=60.0, memory=512 * MIB, disk=16 * MIB, output=MIB)
    names = [name for name in ("bwrap", "sandlock") if name != "bwrap" or shutil.which("bwrap")]
    launchers = [SandboxLauncher(name, interpreter(None), limits) for name in names]
    ways = {"plain": plain(), **{runner.sandbox: sandboxed(runner) for runner in launchers}}
    for runner in ways.values():
        await runner(PROGRAM.format(work=0))
    rows = []
    print(f"{'':10} {'work':>8} {'alone':>10} {'above plain':>12} {'a second':>10} {'ratio':>7}")
    for work in args.work:
        for name, row in (await measure(ways, work, args.programs)).items():
            rows.append({"name": name, **row})
            print(
                f"{name:10} {row['work_ms']:5.0f} ms {row['alone_ms']:7.1f} ms {row['above_plain_ms']:9.1f} ms "
                f"{row['per_second']:10.1f} {row['ratio']:7.2f}"
            )
    for launcher in launchers:
        launcher.close()
    if args.output:
        machine = {
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
        args.output.write_text(
            json.dumps({"machine": machine, "programs": args.programs, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    asyncio.run(main())
