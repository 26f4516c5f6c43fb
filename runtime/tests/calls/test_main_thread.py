"""The main thread says what keeps the event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time

import psutil
import pytest
from rlhf.errors import StandstillError
from rlhf_runtime.calls.main_thread import MainThread
from rlhf_runtime.loop.signals import StopRequest


def test_a_coroutine_that_blocks_the_event_loop_is_named_once(capsys):
    waiting = threading.Event()

    async def blocks():
        return waiting.wait(60)  # no await: nobody else has a turn

    def release():
        while "note:" not in (output := capsys.readouterr().err):
            time.sleep(0.01)
        time.sleep(0.2)  # several more intervals, in which it is not said again
        heard.append(output + capsys.readouterr().err)
        waiting.set()

    heard: list[str] = []
    main, other = MainThread(standstill=0.02), threading.Thread(target=release)
    other.start()
    try:
        assert main.run(blocks()) is True
    finally:
        other.join()
        main.close()
    line = inspect.getsourcelines(blocks)[1] + 1
    assert heard[0].count("note:") == 1
    assert f"blocks() at {__file__}:{line}, an `async def`" in heard[0]
    assert "Write it as plain `def`" in heard[0]


def test_a_coroutine_that_awaits_is_not_named_and_completes_after_a_stop_request(capsys):
    async def sleeps():
        await asyncio.sleep(0.5)
        return 7

    stop = StopRequest()
    main = MainThread(stop, standstill=0.1, grace=0.1)
    stop.request("SIGTERM")
    try:
        assert main.run(sleeps()) == 7
    finally:
        main.close()
    assert capsys.readouterr().err == ""


def test_a_coroutine_that_blocks_is_abandoned_after_a_stop_request(capsys):
    """Not before, and the reason names the request and the line."""
    waiting = threading.Event()

    async def blocks():
        return waiting.wait(60)

    stop = StopRequest()
    main = MainThread(stop, standstill=60, grace=0.3)
    asking = threading.Timer(0.5, stop.request, ["SIGTERM"])
    asking.start()
    began = time.monotonic()
    try:
        with pytest.raises(
            StandstillError, match=r"^SIGTERM asked the run to stop, but blocks\(\) at .* has blocked .* for .* s: "
        ) as error:
            main.run(blocks())
        assert time.monotonic() - began >= 0.8
    finally:
        waiting.set()
        asking.join()
        main.close()
    line = inspect.getsourcelines(blocks)[1] + 1
    assert f"{__file__}:{line} has blocked all rollouts, rewards and environments" in str(error.value)
    main._thread.join(10)
    assert main.loop.is_closed(), "nobody waited for it"


@pytest.mark.parametrize("form", ["exec", "shell"])
def test_processes_that_coroutines_started_end_with_the_loop(form: str, caplog) -> None:
    """One that a cancelled coroutine has left, say: nobody waits for it any more."""

    async def start() -> int:
        started = asyncio.create_subprocess_exec("sleep", "600")
        if form == "shell":
            started = asyncio.create_subprocess_shell("exec sleep 600")
        return (await started).pid

    main = MainThread()
    try:
        pid = main.run(start())
        assert psutil.pid_exists(pid)
    finally:
        main.close()
    assert not psutil.pid_exists(pid)
    assert "Loop" not in caplog.text, "asyncio has seen its end"


def test_tasks_that_hold_something_for_the_whole_run_are_cancelled_at_its_end() -> None:
    closed = []

    async def hold() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    tasks = []

    async def start() -> None:
        tasks.append(asyncio.create_task(hold()))
        await asyncio.sleep(0)

    main = MainThread()
    try:
        main.run(start())
    finally:
        main.close()
    assert closed == [True]
    assert tasks[0].cancelled()


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_a_task_that_exits_does_not_stop_the_event_loop(error):
    async def exits():
        raise error

    async def waits():
        task = asyncio.create_task(exits())
        await asyncio.wait({task})
        await asyncio.sleep(0.01)
        return task.exception()

    main = MainThread()
    try:
        assert main.run(waits()) is error
    finally:
        main.close()
