"""Engines behind one front: requests spread, weights to all, and engines that are killed while they work."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ray_standins import OddConfig, OddGenerator, OddTrainer, tokens
from rlhf.errors import CapabilityError, ConfigError, RolloutError, SyncError, WorkerError
from rlhf.interfaces import GENERATOR, GeneratorSpec, ModelSpec, Place
from rlhf.types import GenerationRequest, RoleSpec, Sampling

pytestmark = pytest.mark.slow

TRANSPORTS = ["auto", "shared", "broadcast"]  # on CPUs "auto" is the object store


class Run:
    """What the controller does with a policy and engines."""

    def __init__(self, launcher, folder: Path, engines: int = 2, seconds: float = 0.0, transport: str = "auto") -> None:
        launcher.place({"policy": Place(), GENERATOR: Place(engines)})
        launcher.choose_link(OddGenerator, transport)
        self.folder = folder
        self.policy = launcher.launch_trainer(OddTrainer, None, ModelSpec(RoleSpec("policy", trained=True), ""))
        config = OddConfig(folder=str(folder), seconds=seconds)
        self.engines = launcher.launch_generator(OddGenerator, config, GeneratorSpec((0,), str))
        launcher.link(self.policy, self.engines, 60.0)
        self.engines.refresh = self.push
        self.version = self.pushes = 0

    def push(self) -> None:
        self.pushes += 1
        self.engines.begin_load(self.version)
        for bucket in self.policy.stream("ship", "live", 24, timeout=60.0):
            self.engines.take(bucket)
        self.proofs = self.engines.end_load()
        self.weights = "".join(sorted(self.policy.call("sent", [()])[0].values()))

    def sync(self, version: int) -> None:
        self.version = version
        self.push()

    def notes(self, word: str) -> list[list[str]]:
        lines = [line.split(maxsplit=2) for line in (self.folder / "notes.txt").read_text().splitlines()]
        return [line for line in lines if line[0] == word]

    def pids(self) -> list[int]:
        return [engine.facts["pid"] for engine in self.engines.engines.values()]

    def answers(self, requests) -> dict[int, list[int]]:
        got: dict[int, list[int]] = {}
        for position, turn in self.engines.generate(requests):
            assert position not in got
            assert turn.versions == ((0, self.version),)
            got[position] = turn.ids
        return got


@pytest.fixture
def run(launch, tmp_path):
    def make(*, engines: int = 2, seconds: float = 0.0, transport: str = "auto", **options) -> Run:
        return Run(launch(**options), tmp_path, engines, seconds, transport)

    return make


def requests(prompts: int, samples: int = 4) -> list[GenerationRequest]:
    return [GenerationRequest((p, 1), 100 * p + s, Sampling(8)) for p in range(prompts) for s in range(samples)]


def kill_soon(pid: int, seconds: float) -> None:
    def kill() -> None:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def expected(weights: str, asked) -> dict[int, list[int]]:
    return {n: tokens(weights, r) for n, r in enumerate(asked)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_requests_go_to_all_engines_and_weights_too(run, transport):
    r = run(transport=transport)
    asked = requests(6)
    assert r.answers(asked) == expected("initial", asked)
    calls = r.notes("generate")
    assert {int(pid) for _, pid, _ in calls} == set(r.pids())
    assert sorted(len(seeds.split(",")) for *_, seeds in calls) == [12, 12]
    r.sync(3)
    assert r.engines.version == 3
    assert [(p.who, p.version) for p in r.proofs] == [("engine 0", 3), ("engine 1", 3)]
    assert all(p.received == r.policy.call("sent", [()])[0] for p in r.proofs)
    assert r.answers(asked) == expected(r.weights, asked)
    assert [[round(x[0]) for x in e] for e in r.engines.logprobs([(1, 2), (3, 4)])] == [[pid, pid] for pid in r.pids()]
    assert [r.engines.stale(bucket) for bucket in r.policy.stream("ship", "live", 24)] == [["w0", "w1"], ["w2", "w3"]]
    assert [kind for _, kind in r.notes("connect")] == [transport] * 2 * (transport != "auto"), "connected once"
    r.engines.sleep()
    r.engines.wake()
    assert [len(r.notes(word)) for word in ("sleep", "wake")] == [2, 2]
    assert r.engines.name == "odd"
    assert "accept:tensors" in r.engines.capabilities


def test_samples_come_as_they_finish(run):
    r = run(seconds=0.3)
    start, times = time.monotonic(), []
    for _ in r.engines.generate(requests(4, 2)):
        times.append(time.monotonic() - start)
    assert len(times) == 8
    assert times[-1] - times[0] > 0.5


def test_a_killed_engine_is_replaced_and_its_samples_are_drawn_again(run, caplog, capfd):
    r = run(seconds=0.2)
    r.sync(1)
    asked = requests(6)
    before = r.pids()
    kill_soon(before[0], 0.7)
    assert r.answers(asked) == expected(r.weights, asked)
    after = r.pids()
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert r.pushes == 2, "the new engine got the weights of now"
    assert f"engine 0 (node 127.0.0.1, pid {before[0]}) died during generate()" in caplog.text
    assert "It is replaced; 2 more may be" in caplog.text
    assert capfd.readouterr().out == "", "Ray does not say it once more"
    drawn = [seed for *_, seeds in r.notes("generate") for seed in eval(seeds)]
    assert 24 < len(drawn) < 36, "only what was not finished is drawn again"
    assert r.answers(asked) == expected(r.weights, asked)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_killed_before_a_sync(run, transport):
    r = run(transport=transport)
    r.sync(1)
    os.kill(r.pids()[1], signal.SIGKILL)
    r.sync(2)
    assert [(p.who, p.version) for p in r.proofs] == [("engine 0", 2), ("engine 1", 2)]
    asked = requests(4)
    assert r.answers(asked) == expected(r.weights, asked)


def test_an_engine_killed_between_two_calls(run):
    r = run()
    r.sync(1)
    os.kill(r.pids()[1], signal.SIGKILL)
    asked = requests(4)
    assert r.answers(asked) == expected(r.weights, asked)
    assert r.pushes == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("when", ["die-in-take", "die-before-take"])
def test_an_engine_killed_while_it_takes_weights(run, transport, when):
    r = run(transport=transport)
    r.sync(1)
    (r.folder / when).touch()
    before = r.pids()
    r.sync(2)
    assert r.pushes == 3
    assert [(p.who, p.version) for p in r.proofs] == [("engine 0", 2), ("engine 1", 2)]
    assert len(set(before) & set(r.pids())) == 1
    asked = requests(4)
    assert r.answers(asked) == expected(r.weights, asked)


def test_an_engine_killed_asleep(run):
    r = run()
    r.sync(1)
    r.engines.sleep()
    os.kill(r.pids()[0], signal.SIGKILL)
    r.engines.wake()
    assert r.pushes == 2
    asked = requests(4)
    assert r.answers(asked) == expected(r.weights, asked)


def test_an_engine_killed_before_the_canaries(run):
    r = run()
    r.sync(1)
    os.kill(r.pids()[0], signal.SIGKILL)
    assert [round(e[0][0]) for e in r.engines.logprobs([(1, 2)])] == r.pids()
    assert r.pushes == 2


def test_an_engine_that_says_that_it_is_gone_is_replaced(run):
    """A generator whose own processes died raises WorkerError."""
    r = run(max_restarts=2)
    with pytest.raises(WorkerError, match=r"the engine's own process is gone\nThe run stops: 2 engines were replaced"):
        r.answers([GenerationRequest((1,), -2, Sampling(8))])
    assert len(r.notes("started")) == 4


def test_deaths_beyond_the_limit_end_the_run(run):
    r = run(max_restarts=0)
    r.sync(1)
    os.kill(r.pids()[0], signal.SIGKILL)
    with pytest.raises(
        WorkerError, match=r"(?s)engine 0 \(node 127.0.0.1, pid \d+\) died .*0 engines were replaced already"
    ) as info:
        r.answers(requests(4))
    assert "launcher.max_restarts" in str(info.value)


def test_a_request_that_fails_is_an_error_not_a_death(run):
    r = run()
    with pytest.raises(
        RolloutError, match=r"engine \d .*generate\(\) raised ValueError: a request that no engine survives"
    ):
        r.answers([GenerationRequest((1,), -1, Sampling(8))])
    assert len(r.notes("started")) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_sync_that_failed_can_be_tried_again(run, transport):
    r = run(transport=transport)
    r.engines.begin_load(1)
    shipped = r.policy.stream("ship", "live", 24, timeout=60.0)
    r.engines.take(next(shipped))
    with pytest.raises(SyncError, match=r"engine \d .*take\(\) raised AttributeError"):
        r.engines.take("no bucket")
    del shipped  # the controller reads no further
    r.sync(2)
    asked = requests(4)
    assert r.answers(asked) == expected(r.weights, asked)
    assert sorted(r.pids()) == sorted(int(pid) for _, pid in r.notes("started")), "nobody died"


def test_a_transport_that_cannot_be_had_is_refused(launch):
    class Alone(OddGenerator):
        name = "alone"
        capabilities = frozenset({"accept:tensors"})

    launcher = launch()
    launcher.place({"policy": Place(), GENERATOR: Place(1)})
    launcher.choose_link(Alone, "auto")
    with pytest.raises(ConfigError, match=r"'broadcast' cannot be had: the generator takes no links .*: 'store', or"):
        launcher.choose_link(Alone, "broadcast")


def test_failures_of_the_sync_are_sync_errors(run):
    r = run()
    with pytest.raises(SyncError, match=r"engine \d .*take\(\) raised AttributeError"):
        r.engines.take("no bucket")


def test_an_engine_that_cannot_start(launch):
    launcher = launch()
    launcher.place({"policy": Place(), GENERATOR: Place(2)})
    with pytest.raises(
        WorkerError, match=r"engine \d \(node 127.0.0.1, pid \d+\): start\(\) raised ValueError: no engine today"
    ):
        launcher.launch_generator(OddGenerator, OddConfig(fail_start=True), GeneratorSpec((0,), str))


def test_generators_that_live_in_the_trainer_are_refused(launch):
    class Inside(OddGenerator):
        name = "inside"
        capabilities = frozenset({"accept:module"})

    with pytest.raises(CapabilityError, match="generator 'inside' samples from a trainer's module"):
        launch().launch_generator(Inside, None, GeneratorSpec((0,), str))


def test_close_ends_the_engines(run):
    r = run()
    r.engines.close()
    for _ in range(100):
        if not any(_lives(pid) for pid in r.pids()):
            break
        time.sleep(0.1)
    assert not any(_lives(pid) for pid in r.pids())


def _lives(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
