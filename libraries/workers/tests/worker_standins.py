"""Trainers and generators without a model. They can fail in the ways that real ones do. Workers import them."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rlhf.errors import CheckpointError, RlhfError, WorkerError
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import AnswersRequests, Generator, Proof, Sleeps
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.types import GenerationRequest, Turn
from rlhf_testing.launcher import CountingTrainer
from rlhf_workers.links.receiving import ReceivesOverLinks


class OddTrainer(CountingTrainer):
    """A counter in place of a model."""

    name = "odd"

    def where(self) -> dict[str, Any]:
        names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "RLHF_TEST")
        return {n: os.environ.get(n) for n in names} | {
            "pid": os.getpid(), "spec": self.spec, "folder": os.getcwd(), "torch": "torch" in sys.modules,
        }  # fmt: skip

    def prints(self, text: str) -> None:
        print(text, flush=True)

    def same(self, value: Any) -> Any:
        return value

    def double(self, tensor: Any) -> Any:
        """Writes to its argument."""
        return tensor.mul_(2)

    def raises(self, how: str) -> None:
        sys.stderr.write(f"about to raise {how}\n")
        if how == "checkpoint":
            raise CheckpointError("a damaged checkpoint")
        if how == "own":
            raise OwnError("an error of a plugin's own")
        if how == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise ValueError("a plain error")

    def raises_on(self, rank: int, others: float) -> int:
        """One rank raises at once; the others wait ``others`` seconds, as in a collective."""
        if self.spec.rank == rank:
            raise ValueError(f"first cause on {rank}")
        time.sleep(others)
        return self.spec.rank

    def dies(self, rank: int, others: float) -> None:
        """One rank's process is killed. After ``others`` seconds the other ranks raise."""
        if self.spec.rank == rank:
            sys.stderr.write("last words\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(others)
        raise RuntimeError("Connection closed by peer")

    def sleeps(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def spin(self, seconds: float) -> str:
        """Compute in Python without a pause."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return "spun"

    def arrays(self, count: int, nbytes: int, pause: float = 0.0) -> Iterator[Any]:
        """Rank 0 yields arrays; every rank takes part."""
        import numpy

        self.made = 0
        for n in range(count):
            time.sleep(pause if n else 0.0)
            self.made = n + 1
            if self.spec.rank == 0:
                yield numpy.full(nbytes, n, dtype=numpy.uint8)

    def how_many(self) -> int:
        return self.made

    def breaks_off(self, rank: int, after: int, marker: str = "") -> Iterator[int]:
        """The rank ``rank`` fails after ``after`` items, once the file ``marker`` exists."""
        yield from range(after)
        if self.spec.rank == rank:
            while marker and not Path(marker).exists():
                time.sleep(0.05)
            raise ValueError(f"no more after {after}")
        time.sleep(60.0 if rank else 0.0)

    def first_of(self, arrays: Sequence[Any]) -> list[int]:
        """Takes items that another group streamed."""
        return [int(a[0]) for a in arrays]

    def adds(self) -> float:
        """Sum of rank + 1 over all ranks, by a collective of torch."""
        import torch
        from torch import distributed

        if not distributed.is_initialized():
            distributed.init_process_group(
                "gloo", self.spec.rendezvous, rank=self.spec.rank, world_size=self.spec.world_size
            )
        value = torch.tensor([self.spec.rank + 1.0])
        distributed.all_reduce(value)
        return float(value)


class OwnError(RlhfError):
    """An error class of a plugin, which the driver may not know."""


class OddConfig(ComponentConfig):
    folder: str = ""
    """Folder in which engines write notes for the test."""
    seconds: float = 0.0
    """Seconds per sample."""
    fail_start: bool = False
    """Raise in the constructor."""
    slow_start: float = 0.0
    """Seconds that the constructor takes."""


class OddGenerator(ReceivesOverLinks, AnswersRequests, Sleeps, Generator):
    """Tokens are a hash of weights, prompt and seed, one sample after another."""

    name = "odd"
    capabilities = frozenset({"logprobs", "seeds"})
    Config = OddConfig

    def __init__(self, config: OddConfig | None, spec: GeneratorSpec) -> None:
        if config is not None and config.fail_start:
            raise ValueError("no engine today")
        if config is not None:
            time.sleep(config.slow_start)
        self.config, self.spec = config or OddConfig(), spec
        self.weights = "initial"
        self.receiver: Any = None
        self.asleep = False
        self.unfinished: dict[int, tuple[GenerationRequest, float]] = {}
        """Requests of :meth:`advance`, each with the time when its answer is complete."""
        self.note(f"started {os.getpid()}")
        self.note(f"sees {os.environ.get('CUDA_VISIBLE_DEVICES')}")
        self._flagged("die-in-start")

    def note(self, text: str) -> None:
        if self.config.folder:
            with open(Path(self.config.folder) / "notes.txt", "a") as file:
                file.write(f"{text}\n")

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        self.note(f"generate {os.getpid()} {[r.seed for r in requests]}")
        for position, request in enumerate(requests):
            time.sleep(self.config.seconds)
            if request.seed == -1:
                raise ValueError("a request that no engine survives")
            yield position, self._turn(request)

    def advance(
        self, requests: Mapping[int, GenerationRequest], dropped: Sequence[int] = (), seconds: float = 0.0
    ) -> list[tuple[int, Turn]]:
        """All requests at once, each in ``seconds`` of the config. A request with the seed -3 is never answered."""
        for name, request in requests.items():
            if request.seed == -1:
                raise ValueError("a request that no engine survives")
            took = float("inf") if request.seed == -3 else self.config.seconds
            self.unfinished[name] = request, time.monotonic() + took
            self.note(f"asked {os.getpid()} {request.seed}")
        for name in dropped:
            request, _ = self.unfinished.pop(name)
            self.note(f"dropped {os.getpid()} {request.seed}")
        time.sleep(seconds)
        names = [name for name, (_, end) in self.unfinished.items() if time.monotonic() >= end]
        return [(name, self._turn(self.unfinished.pop(name)[0])) for name in names]

    def unfinished_tokens(self) -> int:
        """Ten of each request."""
        return 10 * len(self.unfinished)

    def _turn(self, request: GenerationRequest) -> Turn:
        return Turn(tokens(self.weights, request), True, [0.0], ((0, self.version),), "stop")

    def begin_load(self, version: int) -> None:
        if self._takes_away("lost-in-load"):
            raise WorkerError("the engine's own process is gone")
        if self._takes_away("fail-begin"):
            raise OSError("no memory today")
        self.coming, self.got = version, {}

    def connect(self, link: Any, first: int) -> None:
        import torch
        from rlhf_workers.links.ends import connect_receiver

        self.note(f"connect {link.kind}")
        self._flagged("die-before-connect")
        if self._takes_away("fail-connect"):
            raise OSError("no network today")
        self.receiver = connect_receiver(link, first, torch.device("cpu"))
        self._flagged("die-after-connect")

    def receivers(self) -> int:
        self._flagged("die-receivers")
        return 1

    def take(self, sent: Any) -> None:
        self._flagged("die-before-take")
        if self._takes_away("sleep-in-take"):
            time.sleep(3)
        with self.receiver.open(sent) if self.receiver is not None else nullcontext(sent) as bucket:
            self.got |= bucket.received()
        self._flagged("die-in-take")

    def _flagged(self, name: str) -> None:
        if self._takes_away(name):
            os.kill(os.getpid(), signal.SIGKILL)

    def _takes_away(self, name: str) -> bool:
        """Whether a flag file of this name exists and this engine was the first to remove it."""
        if not self.config.folder:
            return False
        try:
            (Path(self.config.folder) / name).unlink()
        except FileNotFoundError:
            return False
        return True

    def end_load(self) -> list[Proof]:
        self.version, self.weights = self.coming, "".join(sorted(self.got.values()))
        return [Proof(self.version, received=self.got)]

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[list[float]]]:
        return [[[float(os.getpid())] * (len(s) - 1) for s in sequences]]

    def stale(self, sent: Any) -> list[str]:
        with self.receiver.open(sent) if self.receiver is not None else nullcontext(sent) as bucket:
            return [name for name, _ in bucket.tensors]

    def sleep(self) -> None:
        self.asleep = True
        self.bare = self._takes_away("forget-in-sleep")
        if self.bare:
            self.weights = "none"
        self.note("sleep")

    def wake(self) -> bool:
        self.asleep = False
        self.note("wake")
        return self.bare


def tokens(weights: str, request: GenerationRequest) -> list[int]:
    """The tokens that every engine with these weights samples for a request."""
    return [int(hashlib.sha256(f"{weights}{list(request.ids)}{request.seed}".encode()).hexdigest()[:6], 16)]
