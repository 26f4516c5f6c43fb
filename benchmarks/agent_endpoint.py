"""What the endpoint of the rollout ``agent`` adds to a turn: the time from a program's request to its answer, less the
time that the generator takes, which is fixed here.

    python benchmarks/agent_endpoint.py [--samples 64] [--seconds 0.5] [--output results/NAME.json]

Every sample is a process with a conversation of ten turns. All begin at one time, after their processes have started.
Tokens, chat template, tree and HTTP are the real ones; only the generator is made up: an answer takes ``--seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.interfaces import Generator, Proof
from rlhf.types import GenerationRequest, Group, Row, Sampling, Turn
from rlhf_plugin_agent import Agent
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.config.data_section import DataSection
from rlhf_runtime.data.template import Template
from rlhf_runtime.samples.rollout_settings import RolloutSettings
from rlhf_runtime.samples.rollouts import Rollouts
from rlhf_testing.chat_templates import HERMES
from rlhf_testing.tiny import tiny_tokenizer
from transformers import AutoTokenizer

TURNS, WARM_UP = 10, 2
PROGRAM = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

task = json.load(sys.stdin)
at = urlsplit(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(at.hostname, at.port)
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages, times = [{"role": "user", "content": "x" * 2000}], []
time.sleep(max(0, task["start"] - time.time() + task["delay"]))
for _ in range(task["turns"]):
    body = json.dumps({"model": "policy", "messages": messages})
    begin = time.perf_counter()
    connection.request("POST", at.path + "/chat/completions", body, head)
    answer = json.load(connection.getresponse())
    times.append(time.perf_counter() - begin)
    messages += [answer["choices"][0]["message"], {"role": "user", "content": "y" * 200}]
with open(task["times"], "a") as file:
    file.write(json.dumps(times) + "\\n")
"""


class Fixed(Generator):
    """Answers with the same 100 tokens after a fixed time."""

    name = "fixed"

    def __init__(self, ids: list[int], seconds: float) -> None:
        self.ids, self.seconds = ids, seconds
        self.now = self.most = 0

    async def answer(self, request: GenerationRequest) -> Turn:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        return Turn(self.ids, True, [-1.0] * len(self.ids), ((0, 0),), "stop", text="a" * (len(self.ids) - 1))

    def generate(self, requests: list[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        raise NotImplementedError

    def load(self, source: Any, version: int) -> Proof:
        return Proof(version)


class Unscored:
    async def score(self, group: Group, trained_on: bool = True) -> None:
        return None


def measured(samples: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Milliseconds that the endpoint added to a turn."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(folder / "tokenizer", chat_template=HERMES))
    generator = Fixed([*tokenizer("a" * 99)["input_ids"], tokenizer.eos_token_id], seconds)
    script, times = folder / "program.py", folder / "times.jsonl"
    script.write_text(PROGRAM)
    rollout = Agent(Agent.Config(command=(sys.executable, "-S", str(script)), concurrency=samples))
    rollout.check()
    main = MainThread()
    template = Template(tokenizer, DataSection())
    rollouts = Rollouts(rollout, generator, template, Unscored(), main, single_requests=True)
    start = time.time() + 2 + samples / 16
    rows = [
        Row(
            {"prompt": "", "start": start, "delay": seconds * n / samples, "turns": TURNS, "times": str(times)},
            "rows",
            n,
        )
        for n in range(samples)
    ]
    begin = time.process_time()
    try:
        groups = rollouts.run(rows, 0, RolloutSettings(Sampling(100), 1, "sample", 0, 10**6, 600.0))
    finally:
        main.close()
    used = time.process_time() - begin
    assert all(
        t.status == "ok" and sum(turn.sampled for turn in t.turns) == TURNS for g in groups for t in g.trajectories
    )
    found = [json.loads(line) for line in times.read_text().splitlines()]
    added = sorted(1000 * (t - seconds) for row in found for t in row[WARM_UP:])
    return {
        "samples": samples,
        "most_under_way": generator.most,
        "seconds": seconds,
        "turns": len(added),
        "median_ms": round(statistics.median(added), 2),
        "p95_ms": round(added[int(0.95 * len(added))], 2),
        "processor_ms_a_turn": round(1000 * used / (samples * TURNS), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measured(given.samples, given.seconds, Path(folder))
    result |= {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(result, indent=2))
    if given.output:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
