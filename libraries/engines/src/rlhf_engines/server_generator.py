"""The base class of generators that sample from servers that are already running, and send them new weights."""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from rlhf.errors import CapabilityError, ConfigError, ModelError, SyncError
from rlhf.interfaces import Generator, GeneratorSpec, TakesTensors
from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import Proof
from rlhf.interfaces.memory import EngineMemory, ModelSize, PhaseMemory, SamplingWork
from rlhf.secrets import read_token
from rlhf.types import GenerationRequest, Image, Sampling, Turn
from rlhf.weights.bucket import Bucket
from rlhf_modeling.arithmetic import computes_bf16

from rlhf_engines.differences import SentWeights
from rlhf_engines.requests import OpenRequest, check_fits
from rlhf_engines.server import EngineServer
from rlhf_engines.server_config import EngineServersConfig
from rlhf_engines.weight_files import WeightsFolder, write_bucket

T = TypeVar("T")
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


class ServerGenerator(TakesTensors, Generator):
    """A server at each of ``urls``: one engine, or several with the same weights.

    Weights pass through files, bucket by bucket; each worker of each server fingerprints the data that it read. When
    the run ends, the servers keep its last weights. Before samples are passed on, their servers are asked whether they
    still hold the weights. A restarted server ends the run.

    The workers of a server must answer these calls (:meth:`EngineServer.call`): ``rlhf_facts(path)``,
    ``rlhf_start(base)``, ``rlhf_take_file(path)``, ``rlhf_finish(load)``, ``rlhf_differing_file(path)`` and
    ``rlhf_load_name()``.
    """

    Config: ClassVar[type[ComponentConfig]] = EngineServersConfig
    engine: ClassVar[str]
    """The engine's name, for messages."""
    tokens: ClassVar[tuple[str, ...]] = ("token_env",)
    """Options that name an environment variable with a token."""

    @classmethod
    def memory(
        cls, config: Any, dtype: str, size: ModelSize, work: SamplingWork, device: str, device_bytes: int | None
    ) -> EngineMemory:
        """Memory on this machine, since the servers are elsewhere. For differences, the host holds the sent weights in
        the servers' format, which is assumed to be the policy's arithmetic."""
        count = size.parameters * (2 if computes_bf16(dtype, device) else 4) if config.sync == "differences" else 0
        copy = PhaseMemory({"weights": count} if count and device == "cpu" else {}, 0 if device == "cpu" else count)
        return EngineMemory(dict.fromkeys(("rest", "asleep", "generate"), copy), copy=False, cache_token=0)

    @classmethod
    def check(cls, config: Any, spec: GeneratorSpec, samplings: Sequence[Sampling], device: str | None) -> None:
        super().check(config, spec, samplings, device)
        for option in cls.tokens:
            variable = getattr(config, option)
            if variable is not None:
                read_token(f"generator {cls.name!r}", option, variable)
        if device is not None and config.folder is not None and not Path(config.folder).is_dir():
            raise ConfigError(
                f"generator {cls.name!r}: folder = {config.folder!r} is not a folder of this machine. Create it, or "
                "name another that this process and the servers see."
            )

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        if not isinstance(config, EngineServersConfig):
            raise ConfigError(f"generator {self.name!r} needs generator.urls, the addresses of its servers")
        self.check(config, spec, (), "cpu")  # this machine writes the files
        self.config: Any = config
        self.spec = spec
        self._folder = WeightsFolder(config.folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
        self._thread.start()
        self._servers = [self._server(url) for url in config.urls]
        self._loading: int | None = None
        self._load, self._buckets = "", 0
        self._sent_weights: SentWeights | None = None
        self._not_ready = "it has no weights yet"
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    def _meet(self) -> None:
        file = self._folder.path / "hello"
        file.write_text(secrets.token_hex())
        self._ask_servers(lambda server: server.meet(file))
        file.unlink()
        for server in self._servers:
            if fault := self._unusable(server.facts):
                raise CapabilityError(f"generator {self.name!r}: {server.url} {fault}")
        self.longest = min(self.spec.max_tokens, *(server.facts["length"] for server in self._servers))
        self.vocabulary = min(server.facts["vocabulary"] for server in self._servers)
        if self.config.sync == "differences":
            self._sent_weights = SentWeights({server.facts["dtype"] for server in self._servers})

    @abstractmethod
    def _server(self, url: str) -> EngineServer: ...

    @abstractmethod
    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """The request in the engine's form. It names everything on which its samples depend."""

    @abstractmethod
    def _unusable(self, facts: dict[str, Any]) -> str:
        """Why a server cannot be used; empty if it can."""

    def _token(self, option: str) -> str | None:
        variable = getattr(self.config, option)
        return None if variable is None else os.environ[variable]

    # ------------------------------------------------------------------------------------ sampling

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        """See :class:`~rlhf.interfaces.Generator`. Requests are checked at the call. Closing the iterator early drops
        unfinished requests."""
        self._ready("sample")
        for i, request in enumerate(requests):
            self._check(i, request)
        return self._draw_turns(requests)

    def _check(self, i: int, request: GenerationRequest) -> None:
        self.check_sampling(self.config, request.sampling)
        check_fits(i, request, self.vocabulary, self.longest, 0)

    def _open(self, i: int, request: GenerationRequest) -> OpenRequest:
        return OpenRequest(i, request, self.spec.decode, self.version, self.engine)

    def _draw_turns(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        turns: queue.SimpleQueue[tuple[int, EngineServer, Turn] | None] = queue.SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(self._draw(requests, turns), self._loop)
        task.add_done_callback(lambda _: turns.put(None))
        try:
            while (turn := turns.get()) is not None:
                ready = [turn]
                # One check of the servers' weights covers all turns that are ready.
                while not turns.empty() and (turn := turns.get()) is not None:
                    ready.append(turn)
                self._confirm({server.url: server for _, server, _ in ready})
                yield from ((i, turn) for i, _, turn in ready)
                if turn is None:
                    break
            task.result()
        finally:
            task.cancel()

    async def _draw(self, requests: Sequence[GenerationRequest], turns: Any) -> None:
        free: asyncio.Queue[EngineServer] = asyncio.Queue()
        # Each server once per round, so that few requests are also divided evenly.
        for _ in range(self.config.requests):
            for server in self._servers:
                free.put_nowait(server)

        async def draw(i: int, request: GenerationRequest) -> None:
            server = await free.get()
            turn = await server.sample(lambda: self._open(i, request), self._body(request))
            free.put_nowait(server)
            turns.put((i, server, turn))

        try:
            async with asyncio.TaskGroup() as group:
                for i, request in enumerate(requests):
                    group.create_task(draw(i, request))
        except ExceptionGroup as errors:  # the first one ended the others
            raise errors.exceptions[0] from None

    def _confirm(self, servers: dict[str, EngineServer]) -> None:
        """Raises ModelError if a server does not hold the weights of the last load."""
        for server, loads in self._ask_servers(
            lambda s: s.call("rlhf_load_name", timeout=self.config.timeout), servers.values()
        ):
            if set(loads) != {self._load}:
                self._not_ready = f"{server.url} lost the weights of version {self.version}"
                raise ModelError(
                    f"the server {server.url} no longer holds the weights of version {self.version}: it was "
                    "restarted, or another run sent it weights. Its last samples are not used. Continue with --resume."
                )

    def logprobs(
        self, sequences: Sequence[Sequence[int]], images: Sequence[tuple[Image, ...]] = ()
    ) -> list[list[list[float]]]:
        self._ready("score")
        length = min(server.facts["length"] for server in self._servers)
        for ids in sequences:
            if len(ids) >= length:
                raise ModelError(f"a sequence of {len(ids)} tokens cannot be scored; at most {length - 1} can")
        return [values for _, values in self._ask_servers(lambda server: server.logprobs(sequences, self._load))]

    # ------------------------------------------------------------------------------------- weights

    def begin_load(self, version: int) -> None:
        # Set first: if a step below fails, servers may have different weights.
        self._not_ready = f"its weights of version {version} are not complete"
        self._ask_servers(lambda server: server.pause(self.spec.sync_timeout))
        holders = self._call("rlhf_start", None if self._sent_weights is None else self._sent_weights.begin(version))
        if self._sent_weights is not None and not all(holds for _, workers in holders for holds in workers):
            self._sent_weights.tensors.clear()
        self._loading, self._buckets = version, 0

    def take(self, bucket: Bucket) -> None:
        if self._loading is None:
            raise SyncError("take() without begin_load()")
        self._with_file(
            bucket, "rlhf_take_file", self._sent_weights.write if self._sent_weights is not None else write_bucket
        )

    def end_load(self) -> list[Proof]:
        if self._loading is None:
            raise SyncError("end_load() without begin_load()")
        version, self._loading = self._loading, None
        load = secrets.token_hex(8)
        proofs = []
        for server, workers in self._call("rlhf_finish", load):
            for rank, result in enumerate(workers):
                worker = server.url if len(workers) == 1 else f"{server.url}, worker {rank}"
                if result["missing"]:
                    raise SyncError(
                        f"{worker} did not receive all weights of version {version}: "
                        f"{', '.join(result['missing'][:8])} did not arrive. Nothing is sampled until a load is "
                        "complete."
                    )
                received, nbytes, memory = result["received"], result["nbytes"], result["peak_memory"]
                if self._sent_weights is not None:
                    received, nbytes = self._sent_weights.proof(received), self._sent_weights.nbytes
                proofs.append(Proof(version, worker, nbytes, received, DTYPES[server.facts["dtype"]], memory))
        # Only now: servers without complete weights stay paused.
        self._ask_servers(lambda server: server.resume(self.spec.sync_timeout))
        if self._sent_weights is not None:
            self._sent_weights.end(load)
        self.version, self._load, self._not_ready = version, load, ""
        return proofs

    def stale(self, bucket: Bucket) -> list[str]:
        answers = self._with_file(bucket, "rlhf_differing_file", write_bucket)
        return sorted({name for _, workers in answers for names in workers for name in names})

    def _with_file(
        self, bucket: Bucket, method: str, write: Callable[[Bucket, Path], None]
    ) -> list[tuple[EngineServer, list[Any]]]:
        file = self._folder.path / f"{self._buckets}.safetensors"
        self._buckets += 1
        try:
            write(bucket, file)
            return self._call(method, str(file))
        finally:
            file.unlink(missing_ok=True)

    # --------------------------------------------------------------------------------------- calls

    def _call(self, method: str, *arguments: str | None) -> list[tuple[EngineServer, list[Any]]]:
        return self._ask_servers(lambda server: server.call(method, *arguments, timeout=self.spec.sync_timeout))

    def _ask_servers(self, call: Any, servers: Any = None) -> list[tuple[EngineServer, Any]]:
        """(server, result of ``call(server)``) for each server. All are called at the same time."""
        receivers = list(self._servers if servers is None else servers)

        async def answers() -> list[Any]:
            return await asyncio.gather(*(call(server) for server in receivers))

        return list(zip(receivers, self._run(answers()), strict=True))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _ready(self, action: str) -> None:
        if self._not_ready:
            raise ModelError(f"the generator {self.name!r} cannot {action}: {self._not_ready}")

    def close(self) -> None:
        """Close the connections. The servers keep running, with the last weights."""
        if self._thread.is_alive():
            self._run(_closed(self._servers))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._not_ready = "it is closed"
        self._folder.remove()


async def _closed(servers: Sequence[EngineServer]) -> None:
    for server in servers:
        await server.close()


def refusal(facts: dict[str, Any], spec: GeneratorSpec, sync: str, length_option: str) -> str:
    """Why a server of any engine cannot be used; empty if it can.

    Args:
        length_option: the option that allows a server sequences of ``spec.max_tokens``.
    """
    dtype, length, parts = facts["dtype"], facts["length"], facts["data_parallel"]
    rules = (
        (dtype in DTYPES, f"computes in {dtype}. Start it with --dtype bfloat16 or float32"),
        (
            sync == "whole" or dtype == "float32" or facts["formats"] == [dtype],
            f"keeps parameters in {' and '.join(facts['formats'])}; differences would round all of them to {dtype}. "
            "Set generator.sync = 'whole'",
        ),
        (facts["quantization"] is None, "quantises its weights, so no sync can be proven. Start it unquantised"),
        (
            not facts["speculative"],
            "decodes speculatively, which changes the samples of a seed. Start it without speculative decoding",
        ),
        (parts == 1, f"has {parts} data-parallel engines behind one address. Start one server for each"),
        (
            length >= spec.max_tokens,
            f"takes sequences of {length} tokens, but the run needs {spec.max_tokens}. Start it with {length_option}, "
            "or lower data.max_tokens",
        ),
    )
    return next((fault for holds, fault in rules if not holds), "")
