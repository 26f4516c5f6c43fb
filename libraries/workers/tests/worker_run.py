"""The controller's calls to a policy and to engines in worker processes without a model, and the expected answers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import GenerationRequest, RoleSpec, Sampling
from worker_standins import OddConfig, OddGenerator, OddTrainer, tokens


class Run:
    """A policy, engines, and the transport of weights between them."""

    def __init__(
        self,
        launcher,
        folder: Path,
        engines: int = 2,
        seconds: float = 0.0,
        transport: str = "auto",
        in_flight: str = "continue",
    ) -> None:
        launcher.place({"policy": Place(), GENERATOR: Place(engines)})
        launcher.choose_link(OddGenerator, transport)
        self.folder, self.transport = folder, transport
        self.policy = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), ""))
        config = OddConfig(folder=str(folder), seconds=seconds)
        spec = GeneratorSpec((0,), str, sync_timeout=60.0, in_flight=in_flight)
        self.engines = launcher.launch_generator(OddGenerator, config, spec, self.policy, self.push)
        self.version = self.pushes = 0

    def push(self) -> None:
        self.pushes += 1
        self.engines.pause()
        self.engines.begin_load(self.version)
        self.had_base = self.engines.has_base
        for bucket in self.policy.send_buckets("live", 24, 60.0):
            self.engines.take(bucket)
        self.proofs = self.engines.end_load()
        self.engines.resume()
        self.weights = "".join(sorted(self.policy.call("sent_fingerprints", [()])[0].values()))

    def sync(self, version: int) -> None:
        self.version = version
        self.push()

    def notes(self, word: str) -> list[list[str]]:
        lines = [line.split(maxsplit=2) for line in (self.folder / "notes.txt").read_text().splitlines()]
        return [line for line in lines if line[0] == word]

    def pids(self) -> list[int]:
        return [engine.facts["pid"] for engine in self.engines.pool.members.values()]

    def answers(self, requests, kill: int = 0) -> dict[int, list[int]]:
        """``kill``: process id of an engine that is killed after its first sample."""
        result: dict[int, list[int]] = {}
        for position, turn in self.engines.generate(requests):
            assert position not in result
            assert turn.versions == ((0, self.version),)
            result[position] = [*turn.ids]
            if kill and any(
                int(pid) == kill and requests[position].seed in eval(s) for _, pid, s in self.notes("generate")
            ):
                os.kill(kill, signal.SIGKILL)
                kill = 0
        return result


def requests(prompts: int, samples: int = 4) -> list[GenerationRequest]:
    return [GenerationRequest((p, 1), 100 * p + s, Sampling(8)) for p in range(prompts) for s in range(samples)]


def expected(weights: str, queries) -> dict[int, list[int]]:
    return {n: tokens(weights, r) for n, r in enumerate(queries)}
