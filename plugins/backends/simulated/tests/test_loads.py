"""Loads of weights during an answer of the simulated generator, on a clock that the tests set."""

from __future__ import annotations

import asyncio

import pytest
from generator_cases import dies_once, make, play, request
from rlhf.errors import SyncError
from rlhf.interfaces import GeneratorSpec, ModelSpec
from rlhf.types import RoleSpec
from rlhf_plugin_simulated.pool import SimulatedPool
from rlhf_plugin_simulated.trainer import SimulatedTrainer


async def pause(generator: SimulatedPool) -> asyncio.Task[None]:
    """``pause`` on another thread, as the main thread of a run calls it. No sample starts after this returns."""
    task = asyncio.create_task(asyncio.to_thread(generator.pause))
    while generator._open.is_set():
        await asyncio.sleep(0.001)
    return task


async def resume(generator: SimulatedPool, version: int) -> None:
    """The load itself, and ``resume``. Samples may go on when this returns."""
    generator.begin_load(version)
    generator.end_load()
    await asyncio.to_thread(generator.resume)
    while not generator._open.is_set():
        await asyncio.sleep(0.001)


async def load(generator: SimulatedPool, version: int) -> None:
    """A load that does not wait for samples."""
    await (await pause(generator))
    await resume(generator, version)


@pytest.mark.parametrize("speed", [1.0, 4.0])
def test_continue_samples_the_next_tokens_with_the_new_weights(clock, speed) -> None:
    """A load from 4 s to 6 s: 32 tokens are of version 0, the others of version 1, and the answer ends 2 s later."""

    async def scenario() -> None:
        generator = make(load_seconds=2.0, speed=speed)
        answer = asyncio.create_task(generator.answer(request(0)))
        await clock.pass_(4.0 / speed)
        await load(generator, 1)
        assert clock.now == 6.0 / speed
        await clock.pass_(5.875 / speed)
        assert not answer.done()
        await clock.pass_(0.125 / speed)
        assert (await answer).versions == ((0, 0), (32, 1))

    play(scenario)


@pytest.mark.parametrize(
    ("options", "waits", "end", "versions"),
    [
        ({}, [3.0, 2.0, 0.0, 1.0], 4.0, ((0, 0), (24, 1), (40, 3), (48, 4))),
        ({}, [0.0, 10.0], 0.0, ((0, 1),)),
        # Its engine dies once, after 10 s.
        ({"seed": dies_once(), "deaths": 0.5}, [13.0], 7.0, ((0, 0), (24, 1))),
    ],
    ids=["two between the same tokens", "before the first and after the last token", "in the second try"],
)
def test_loads_during_one_answer(clock, options, waits, end, versions) -> None:
    """``waits``: seconds before each load; ``end``: after the last one."""

    async def scenario() -> None:
        generator = make(**options)
        answer = asyncio.create_task(generator.answer(request(0)))
        for version, seconds in enumerate(waits, 1):
            await clock.pass_(seconds)
            await load(generator, version)
        await clock.pass_(end)
        assert (await answer).versions == versions

    play(scenario)


def test_drain_waits_for_the_samples_under_way_and_holds_new_ones(clock) -> None:
    async def scenario() -> None:
        generator = make("drain", load_seconds=2.0)
        first = asyncio.create_task(generator.answer(request(0)))
        await clock.pass_(4.0)
        paused = await pause(generator)
        second = asyncio.create_task(generator.answer(request(1)))
        await clock.pass_(5.875)
        assert not first.done()
        assert not paused.done()
        await clock.pass_(0.125)
        assert (await first).versions == ((0, 0),)
        await paused
        await resume(generator, 1)
        assert clock.now == 12.0
        await clock.pass_(9.875)
        assert not second.done()
        await clock.pass_(0.125)
        assert (await second).versions == ((0, 1),)

    play(scenario)


def test_restart_samples_every_token_with_the_new_weights(clock) -> None:
    """A load from 4 s to 6 s: the answer ends 10 s after it."""

    async def scenario() -> None:
        generator = make("restart", load_seconds=2.0)
        answer = asyncio.create_task(generator.answer(request(0)))
        await clock.pass_(4.0)
        await load(generator, 1)
        await clock.pass_(9.875)
        assert not answer.done()
        await clock.pass_(0.125)
        assert (await answer).versions == ((0, 1),)

    play(scenario)


@pytest.mark.parametrize("in_flight", ["continue", "restart"])
def test_a_sample_that_is_complete_when_weights_come_is_kept(clock, in_flight) -> None:
    async def scenario() -> None:
        generator = make(in_flight)
        answer = asyncio.create_task(generator.answer(request(0)))
        await clock.pass_(5.0)
        clock.now = 10.5  # its last token was drawn, and it has not been answered
        await load(generator, 1)
        await clock.pass_(0.0)
        assert (await answer).versions == ((0, 0),)

    play(scenario)


def test_weights_are_proven_and_counted() -> None:
    """The generator receives the trainer's steps, with the fingerprint that the trainer sent."""
    trainer = SimulatedTrainer(SimulatedTrainer.Config(seconds=0.0), ModelSpec(RoleSpec("policy", trained=True), ""))
    generator = SimulatedPool(None, GeneratorSpec((1,), str))
    generator.begin_load(3)
    for bucket in trainer.buckets():
        generator.take(bucket)
    [proof] = generator.end_load()
    assert (proof.version, generator.version, dict(proof.received)) == (3, 3, trainer.sent_fingerprints())
    assert set(proof.received) == {"steps"}
    with pytest.raises(SyncError, match=r"end_load\(\) without begin_load"):
        generator.end_load()
    with pytest.raises(SyncError, match=r"take\(\) without begin_load"):
        generator.take(bucket)
