"""`rlhf serve-reward` with a reward model: 64 clients at once, compared with the model's own speed on the same samples.

    python benchmarks/serve_reward.py

Each client sends one group of 8 answers. "own" is one call of the model with all tokens, in micro-batches of its token
budget. "served" is from the first request to the last answer, JSON, tokens and HTTP included; the clients run on the
same cores. The rounds alternate, and the figures are medians. Processor time is that of the server, without clients;
other work on the machine changes it least.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from model import CHARS, make_model
from rlhf.plugins import Plugins
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.config.load import load
from rlhf_runtime.jobs.scoring import place_rewards
from rlhf_runtime.rewards.reward_models import score_with_role
from rlhf_runtime.setup.launch import launch_roles

CLIENTS, GROUP = 64, 8
SHORTEST, LONGEST = 60, 120
"""Characters of an answer, which are its tokens."""
FLAGS = [("roles.reward_model.dtype", "fp32"), ("data.template", "plain")]


def questions() -> list[dict[str, list[str]]]:
    draw, made = random.Random(0), []
    for _ in range(CLIENTS):
        prompt = f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}="
        lengths = (draw.randrange(SHORTEST, LONGEST + 1) for _ in range(GROUP))
        queries = [prompt + "".join(draw.choice(CHARS[:-1]) for _ in range(length)) for length in lengths]
        made.append({"query": queries, "prompts": [prompt] * GROUP})
    return made


async def served(url: str, asked: list[dict[str, list[str]]]) -> list[float]:
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=CLIENTS)) as client:
        answers = await asyncio.gather(*(client.post(url, json=question) for question in asked))
    return [value for answer in answers for value in answer.raise_for_status().json()["rewards"]]


def timed(function: Any, process: psutil.Process) -> tuple[float, float, list[float]]:
    """(seconds, processor seconds of the process, what the function returns)."""
    begin, before = time.perf_counter(), sum(process.cpu_times()[:2])
    found = function()
    return time.perf_counter() - begin, sum(process.cpu_times()[:2]) - before, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the model on both sides")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as closing:
        model, asked = Path(folder) / "model", questions()
        make_model(model, "scalar")
        config = load(None, [("algorithm.use", "score"), ("reward", f"model:{model}"), *FLAGS])
        placed = place_rewards(config, Plugins.discover())
        launcher = placed.parts["launcher"].build()
        closing.callback(launcher.shutdown)
        main_thread = MainThread()
        closing.callback(main_thread.close)
        score = score_with_role(launch_roles(placed, launcher), main_thread)
        tokenizer = placed.tokenizer
        ids = [[*tokenizer(q)["input_ids"], tokenizer.eos_token_id] for question in asked for q in question["query"]]

        command = [sys.executable, "-m", "rlhf_cli.main", "serve-reward", "--reward", f"model:{model}", "--port", "0"]
        words = [word for name, value in FLAGS for word in (f"--{name}", value)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        server = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=environment)
        closing.callback(server.wait)
        closing.callback(server.terminate)
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]

        own, there = psutil.Process(), psutil.Process(server.pid)
        rounds: list[tuple[float, float, float, float]] = []
        for number in range(args.rounds + 1):
            wall, cpu, values = timed(lambda: main_thread.run(score("reward_model", ids)), own)
            served_wall, served_cpu, others = timed(lambda: asyncio.run(served(url, asked)), there)
            assert max(abs(a - b) for a, b in zip(values, others, strict=True)) < 1e-5
            if number:  # the first round warms up
                rounds.append((wall, served_wall, cpu, served_cpu))
    samples, tokens = len(ids), sum(map(len, ids))
    print(f"{CLIENTS} clients, {samples} samples, {tokens} tokens, {args.threads} threads, {args.rounds} rounds")
    print("| | own | served | served / own | rounds |\n|---|---|---|---|---|")
    for name, at in (("seconds", 0), ("processor seconds", 2)):
        ratios = [one[at + 1] / one[at] for one in rounds]
        medians = (statistics.median(one[at + n] for one in rounds) for n in (0, 1))
        shown = " | ".join(f"{value:.2f}" for value in (*medians, statistics.median(ratios)))
        print(f"| {name} | {shown} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
