import os
import signal
import subprocess
import sys
import threading

import pytest
from rlhf_runtime.loop.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_asks_for_a_stop_and_handlers_come_back(number, capfd, request):
    inherited = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    request.addfinalizer(lambda: signal.signal(number, inherited))
    old_handler = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.reason == signal.Signals(number).name
        os.kill(os.getpid(), signal.SIGTERM)  # a second SIGTERM changes nothing
    assert signal.getsignal(number) is old_handler
    assert f"{number.name}: stopping after this step, with a checkpoint" in capfd.readouterr().err


def test_a_hang_up_that_is_ignored_stays_so():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.linux("elsewhere there is no /dev/full")
def test_a_signal_asks_for_a_stop_where_its_line_cannot_be_written():
    stderr, disk = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(disk, 2)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(disk)
    assert stop.reason == "SIGTERM"


def test_a_promise_is_shown_and_a_function_called_at_the_first_request(capfd):
    calls = []
    with StopRequest("ending soon") as stop:
        stop.callback = lambda: calls.append(1)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.request("again")
    assert calls == [1]
    assert "SIGTERM: ending soon (Ctrl-C stops at once)" in capfd.readouterr().err


def test_the_second_ctrl_c_stops_at_once():
    old_handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="second Ctrl-C"), StopRequest():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is old_handler


def test_the_first_ctrl_c_after_a_request_of_code_does_not_stop_at_once():
    with StopRequest() as stop:
        stop.request("run.stop_after = 3")
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT


def test_in_a_thread_only_code_can_ask():
    states = []

    def run():
        with StopRequest() as stop:
            stop.request("test")
            states.append((stop.requested, stop.reason, signal.getsignal(signal.SIGTERM)))

    old_handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert states == [(True, "test", old_handler)]


def test_a_real_process_finishes_its_step():
    program = (
        "import time; from rlhf_runtime.loop.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    step = 0\n"
        "    while not stop.requested:\n"
        "        print('begin', flush=True); time.sleep(0.2); step += 1; print('end', flush=True)\n"
        "print('saved', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.terminate()
    out, _ = process.communicate(timeout=20)
    assert out.split()[-2:] == ["end", "saved"]
    assert process.returncode == 0
