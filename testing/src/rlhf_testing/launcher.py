"""The conformance suite of launchers.

::

    from rlhf_testing.launcher import LauncherContract

    class TestMyLauncher(LauncherContract):
        launcher = MyLauncher
        world_sizes = (1, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.interfaces.component import ComponentConfig
from rlhf.interfaces.generator import Generator, Proof, TakesTensors
from rlhf.interfaces.generator_spec import GeneratorSpec
from rlhf.interfaces.launcher import GENERATOR, Place
from rlhf.interfaces.model import ModelSpec
from rlhf.interfaces.trainer import ApplyResult, SendsWeights, TakesWeights, Trainer
from rlhf.types import GenerationRequest, RoleSpec, Sampling, Turn

from rlhf_testing.contract import Contract, Nonconformance, expect


class CountingTrainer(SendsWeights, TakesWeights, Trainer):
    """Holds a counter instead of a model. Worker processes can import it."""

    name = "counting"

    def __init__(self, config: ComponentConfig | None, spec: ModelSpec) -> None:
        self.config, self.spec, self.calls = config, spec, 0

    def echo(self, value: Any) -> tuple[int, int, Any]:
        """(rank, calls so far, value)."""
        self.calls += 1
        return self.spec.rank, self.calls, value

    def world_size(self) -> int:
        return self.spec.world_size

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def forward(self, micros: Sequence[Any], outputs: Sequence[Any], view: str = "live") -> list[Any]:
        return []

    def accumulate(self, micros: Sequence[Any], loss: Any, coef: Mapping[str, float], live: Mapping[str, str]) -> Any:
        return {}

    def apply(self) -> ApplyResult:
        return ApplyResult(0.0, 0.0)

    def zero_grad(self) -> None:
        return None

    def gradients(self) -> dict[str, Any]:
        return {}

    def weights(self, view: str = "live", every_rank: bool = False) -> Iterator[tuple[str, Any]]:
        import torch

        return ((f"w{n}", torch.full((3,), float(n))) for n in range(4))

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        return None

    def export(self, path: Path, view: str = "live") -> None:
        return None

    def save(self, path: Path) -> None:
        return None

    def load(self, path: Path) -> None:
        return None


class CountingGenerator(TakesTensors, Generator):
    """Answers every request with the request's own tokens. Worker processes can import it."""

    name = "counting"

    def __init__(self, config: ComponentConfig | None, spec: GeneratorSpec) -> None:
        self.config = config

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[int, Turn]]:
        for n, request in enumerate(requests):
            yield n, Turn(request.ids, True, [0.0] * len(request.ids), ((0, self.version),), "stop")

    def begin_load(self, version: int) -> None:
        self.version = version
        self.fingerprints: dict[str, str] = {}

    def take(self, bucket: Any) -> None:
        self.fingerprints |= bucket.received()

    def end_load(self) -> list[Proof]:
        return [Proof(self.version, received=self.fingerprints)]


class LauncherContract(Contract):
    """Checks worker groups and generators with stand-ins that hold no model."""

    kind = "launcher"
    launcher: Any = None
    world_sizes: Sequence[int] = (1,)
    """Numbers of ranks to launch."""

    def launched(self, config: Any, size: int) -> tuple[Any, Any]:
        launcher = self.build(config)
        launcher.place({"policy": Place(size)}, (), Path.cwd())
        return launcher, launcher.launch_trainer(CountingTrainer, None, self.spec("policy", size))

    def spec(self, role: str, size: int = 1) -> ModelSpec:
        return ModelSpec(RoleSpec(role, trained=True), "", world_size=size)

    # ------------------------------------------------------------------------------------- checks

    def test_calls(self) -> None:
        """``call`` passes every rank its own arguments and returns results in rank order. Workers keep their state."""
        for config in self.grid():
            for size in self.world_sizes:
                label = self.label(config)
                launcher, group = self.launched(config, size)
                expect(group.size == size, f"{label} a group of {size} ranks reports the size {group.size}")
                for round_ in (1, 2):
                    answers = [tuple(r) for r in group.call("echo", [(f"for {rank}",) for rank in range(size)])]
                    want = [(rank, round_, f"for {rank}") for rank in range(size)]
                    expect(
                        answers == want,
                        f"{label} call {round_} of {size} ranks must give {want} (rank, calls, value), got {answers}",
                    )
                sizes = group.call("world_size", [()] * size)
                expect(sizes == [size] * size, f"{label} the workers see world sizes {sizes}, not {size}")
                group.shutdown()
                launcher.shutdown()

    def test_wrong_number_of_arguments(self) -> None:
        """Arguments for another number of ranks are refused, not broadcast or cut."""
        for config in self.grid():
            for size in self.world_sizes:
                launcher, group = self.launched(config, size)
                for wrong in (size + 1, size - 1):
                    try:
                        group.call("echo", [(n,) for n in range(wrong)])
                    except Exception:
                        continue
                    raise Nonconformance(f"{self.label(config)} call() accepts arguments for {wrong} of {size} ranks")
                launcher.shutdown()

    def test_first_cause(self) -> None:
        """An exception of a worker reaches the caller with its message, and the group can be called again."""
        for config in self.grid():
            for size in self.world_sizes:
                label = self.label(config)
                launcher, group = self.launched(config, size)
                try:
                    group.call("fail", [(f"first cause on {rank}",) for rank in range(size)])
                except Exception as error:
                    chain, cause = "", error
                    while cause is not None:
                        chain, cause = f"{chain}{cause}", cause.__cause__  # type: ignore[assignment]
                    expect("first cause on" in chain, f"{label} the worker's message is lost: {chain}")
                else:
                    raise Nonconformance(f"{label} an exception in a worker does not reach the caller")
                launcher.shutdown()

    def test_groups_are_apart(self) -> None:
        """Two roles are two groups with separate workers."""
        for config in self.grid():
            launcher = self.build(config)
            launcher.place({"policy": Place(), "critic": Place(share="policy")})
            policy, critic = (
                launcher.launch_trainer(CountingTrainer, None, self.spec(r)) for r in ("policy", "critic")
            )
            policy.call("echo", [(0,)])
            calls = critic.call("echo", [(0,)])[0][1]
            expect(calls == 1, f"{self.label(config)} two groups share a worker")
            launcher.shutdown()

    def test_worker_in_this_process(self) -> None:
        """A launcher that can ``export:module`` gives the worker of a group of one rank. A generator in this process
        samples from its module."""
        if "export:module" not in self.cls.capabilities:
            return
        for config in self.grid():
            launcher, group = self.launched(config, 1)
            expect(
                isinstance(group.worker, CountingTrainer),
                f"{self.label(config)} has the capability 'export:module', but `worker` of a group of one rank is "
                f"{group.worker!r}: set it to the trainer, or remove the capability",
            )
            launcher.shutdown()

    def test_generator(self) -> None:
        """``launch_generator`` returns a generator that accepts a trainer's weight stream and answers every request."""
        for config in self.grid():
            label, launcher = self.label(config), self.build(config)
            launcher.place({"policy": Place(), GENERATOR: Place(share="policy")})
            policy = launcher.launch_trainer(CountingTrainer, None, self.spec("policy"))
            spec = GeneratorSpec((0,), str)
            generator = launcher.launch_generator(CountingGenerator, None, spec, policy, lambda: None)
            expect(
                isinstance(generator, Generator),
                f"{label} launch_generator() must return a Generator, got {type(generator).__name__}",
            )
            generator.begin_load(5)
            for bucket in policy.stream("buckets", "live", 24):  # two tensors of 12 bytes each
                generator.take(bucket)
            proofs, fingerprints = generator.end_load(), policy.call("sent_fingerprints", [()])[0]
            expect(
                len(fingerprints) == 4
                and all(p.version == 5 and p.received == fingerprints for p in proofs)
                and generator.version == 5,
                f"{label} four tensors of version 5 were sent, {fingerprints}; the proof is {proofs}",
            )
            requests = [GenerationRequest((n + 1, 7), n, Sampling()) for n in range(5)]
            answers = {n: turn.ids for n, turn in generator.generate(requests)}
            expect(
                answers == {n: r.ids for n, r in enumerate(requests)},
                f"{label} requests and answers do not match: {answers}",
            )
            launcher.shutdown()

    def test_values_of_a_stream(self) -> None:
        """``value`` converts the items of a stream to values that this process can read."""
        for config in self.grid():
            launcher, group = self.launched(config, self.world_sizes[0])
            buckets = [group.value(item) for item in group.stream("buckets", "live", 24)]
            tensors = {name: tensor.tolist() for bucket in buckets for name, tensor in bucket.tensors}
            want = {f"w{n}": [float(n)] * 3 for n in range(4)}
            expect(tensors == want, f"{self.label(config)} value() of a stream's items must give {want}, got {tensors}")
            launcher.shutdown()

    def test_shutdown_twice(self) -> None:
        """``shutdown`` of groups and launcher can be called twice, and before anything was launched."""
        for config in self.grid():
            launcher, group = self.launched(config, self.world_sizes[0])
            for _ in range(2):
                group.shutdown()
                launcher.shutdown()
            self.build(config).shutdown()
