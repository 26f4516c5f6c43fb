"""Processes are really killed while they save; the disk is really full."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rlhf.errors import CheckpointError
from rlhf_runtime.checkpoint.store import CheckpointStore
from safetensors.numpy import save_file

SCRIPT = Path(__file__).with_name("crash_script.py")


def is_sound(checkpoint, step):
    assert checkpoint.step == step
    assert (checkpoint.path / "policy" / "weights.bin").read_bytes() == bytes([step]) * 50_000
    assert not checkpoint.damage()


@pytest.mark.slow
def test_a_kill_at_any_disk_operation_leaves_a_complete_checkpoint(tmp_path):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points > 20
    outcomes = set()
    for folder in sorted(tmp_path.iterdir()):
        store = CheckpointStore(folder, keep=1)
        newest = store.newest()
        assert newest.step in (2, 3), folder  # never lost, never half
        is_sound(store.open(newest.step), newest.step)
        folders = [p for p in store.root.iterdir() if p.name.startswith("step-")]
        assert len(folders) == len(store.complete()), folder  # what has the name of a checkpoint is one
        outcomes.add((newest.step, 1 in [c.step for c in store.complete()]))

        store.clean()
        assert not [p.name for p in store.root.iterdir() if p.name.startswith(".")], folder
        best = store.best()  # the old best while 3 is not there, 3 as soon as it is
        assert best.step == (3 if newest.step == 3 else 1), folder
        is_sound(best, best.step)

        # and the run goes on from there
        if newest.step == 2:
            store.save(3, lambda f: (f / "x").write_text("x"), {})
        assert store.newest().step == 3
    assert (2, True) in outcomes
    assert (3, True) in outcomes
    assert len(list(tmp_path.iterdir())) == points


@pytest.mark.slow
def test_killed_from_outside_while_saving_large_files(tmp_path):
    program = """
import sys
from rlhf_runtime.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], keep=2)
store.clean()
last = store.newest()
step = last.step if last else 0
while True:
    step += 1
    store.save(step, lambda f: [(f / str(n)).write_bytes(bytes([step % 256]) * 4_000_000) for n in range(4)], {})
    print(step, flush=True)
"""
    seed = random.Random(0)
    reported = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        reported = int(process.stdout.readline())  # at least one is saved per start
        time.sleep(seed.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")[:-1]
        process.wait()
        process.stdout.close()
        reported = int(rest[-1]) if rest else reported
        store = CheckpointStore(tmp_path)
        newest = store.newest()
        assert newest.step >= reported  # what was reported as saved is there
        assert not store.open(newest.step).damage()
        assert all((newest.path / str(n)).read_bytes()[0] == newest.step % 256 for n in range(4))


def good(folder):
    (folder / "weights").write_bytes(b"1" * 1000)


@pytest.mark.linux("elsewhere there is no /dev/full")
def test_full_disk_keeps_the_old_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, good, {})

    def write(folder):
        (folder / "half").write_bytes(b"x" * 100)
        with open("/dev/full", "wb") as file:  # every write to it fails with ENOSPC
            file.write(b"x")

    with pytest.raises(CheckpointError, match=r"step-000002 could not be saved.*disk is full.*save_rollouts.*\[1\]"):
        store.save(2, write, {})
    assert sorted(p.name for p in store.root.iterdir()) == ["step-000001"]
    assert not store.open(1).damage()


def test_file_size_limit_hit_by_safetensors_is_a_full_disk(tmp_path):
    """RLIMIT_FSIZE: writes fail in the middle of a file, in the error class of the library that writes."""
    store = CheckpointStore(tmp_path)
    store.save(1, good, {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="disk is full"):
            store.save(2, lambda folder: save_file({"w": np.zeros(100_000)}, folder / "w.safetensors"), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(p.name for p in store.root.iterdir()) == ["step-000001"]


def test_ctrl_c_in_the_middle_of_a_save_leaves_nothing_half_written(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, good, {})

    def write(folder):
        good(folder)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            store.save(2, write, {})
    finally:
        signal.signal(signal.SIGINT, old_handler)
    assert sorted(p.name for p in store.root.iterdir()) == ["step-000001"]
