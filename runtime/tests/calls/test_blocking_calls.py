"""Calls of plugins that block, in threads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest
from rlhf_runtime.calls.deadlines import with_deadline
from rlhf_runtime.calls.main_thread import MainThread, Threads

NEVER_RETURNS = """
import asyncio, threading
from rlhf_runtime.calls.deadlines import DeadlineExpired, with_deadline
from rlhf_runtime.calls.main_thread import MainThread

async def late():
    try:
        await with_deadline(asyncio.to_thread(threading.Event().wait), 0.2)
    except DeadlineExpired:
        return "given up"

main = MainThread()
print(main.run(late()))
main.close()
"""


def test_a_call_that_never_returns_does_not_block_the_exit() -> None:
    done = subprocess.run([sys.executable, "-c", NEVER_RETURNS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


def test_results_and_errors_come_back() -> None:
    async def scenario() -> tuple[int, str]:
        with pytest.raises(ValueError, match="no"):
            await asyncio.to_thread(int, "no")
        return await asyncio.to_thread(sum, (1, 2)), threading.current_thread().name

    main = MainThread()
    try:
        assert main.run(scenario()) == (3, "rlhf-rollouts")
    finally:
        main.close()


def test_calls_are_limited_and_all_complete() -> None:
    threads, begun, release = Threads(2), threading.Semaphore(0), threading.Event()

    def call(number: int) -> int:
        begun.release()
        release.wait(60)
        return number

    futures = [threads.submit(call, n) for n in range(6)]
    for _ in range(2):
        assert begun.acquire(timeout=60)
    assert [f.running() for f in futures] == [True] * 2 + [False] * 4
    release.set()
    assert [f.result(60) for f in futures] == list(range(6))


def test_waiting_calls_do_not_start_after_shutdown() -> None:
    threads, release = Threads(1), threading.Event()
    first, second = threads.submit(release.wait, 60), threads.submit(int, "1")
    threads.shutdown()
    assert second.cancelled()
    release.set()
    assert first.result(60) is True


def test_a_call_that_ended_while_the_loop_was_blocked_has_its_result() -> None:
    async def late(value: str) -> str:
        time.sleep(0.1)
        return value

    async def scores() -> list[str]:
        return await asyncio.gather(*(with_deadline(late(value), 0.15) for value in "ab"))

    assert asyncio.run(scores()) == ["a", "b"]
