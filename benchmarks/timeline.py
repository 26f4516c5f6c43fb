"""What a timeline costs: processor time and bytes of a sample's turn, with and without a file.

    python benchmarks/timeline.py

A turn is recorded with the call of its environment: two slices. Each sample has 4 turns and is a slice itself; 256
samples are under way at once.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from rlhf_runtime.observe.timeline import NO_TIMELINE, Timeline, TimelineFile

SAMPLES, TURNS, ROUNDS = 256, 4, 20


def samples(timeline: Timeline) -> None:
    with ExitStack() as under_way:
        slices = [
            under_way.enter_context(timeline.slice("samples", "sample", group=n, sample=0, purpose="sample"))
            for n in range(SAMPLES)
        ]
        for turn in range(TURNS):
            for n, sample in enumerate(slices):
                with sample.child("turn", context=1000, group=n, sample=0, turn=turn) as span:
                    span.add(tokens=500, versions=[12, 13])
                with sample.child("environment step"):
                    pass
        for sample in slices:
            sample.add(status="ok", tokens=2000)


def measure(timeline: Timeline) -> float:
    """Microseconds of processor time for each turn, the median of the rounds. The thread that writes is included."""
    times = []
    for step in range(ROUNDS):
        start = time.process_time()
        timeline.step(step)
        samples(timeline)
        times.append((time.process_time() - start) / SAMPLES / TURNS * 1e6)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        file = TimelineFile(path, 1, ROUNDS, print)
        on, baseline = measure(file), measure(NO_TIMELINE)
        file.close()
        size = path.stat().st_size / SAMPLES / TURNS / ROUNDS
    print(
        f"| timeline | processor time of a turn [us] | bytes of a turn |\n|---|---|---|\n| none | {baseline:.1f} | 0 |"
    )
    print(f"| file | {on:.1f} | {size:.0f} |")


if __name__ == "__main__":
    main()
