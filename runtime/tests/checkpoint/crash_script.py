"""Run by the tests: saves checkpoints while being killed at every point where the disk is touched.

usage: crash_script.py FOLDER

Prepares FOLDER/001, FOLDER/002, ...: a run with checkpoints 1 and 2 in which saving checkpoint 3 was killed by SIGKILL
just before the 1st, 2nd, ... call of mkdir, fsync, rename, unlink or rmdir. Prints how many such calls there are.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from rlhf_runtime.checkpoint.store import CheckpointStore


def content(step: int) -> bytes:
    return bytes([step]) * 50_000


def write(step: int):
    def fill(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights.bin").write_bytes(content(step))
        (folder / "state.json").write_text(f'{{"step": {step}}}')
        os.fsync(os.open(folder / "state.json", os.O_RDONLY))  # one more point to die at, inside the caller's own code

    return fill


def die_at(call: int) -> None:
    """SIGKILL this process at its ``call``-th touch of the disk."""
    count = 0
    for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
        original = getattr(os, name)

        def touch(*arguments, original=original, **options):
            nonlocal count
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(os, name, touch)


def main(root: Path) -> None:
    for call in range(1, 500):
        folder = root / f"{call:03d}"
        store = CheckpointStore(folder, keep=2)
        store.save(1, write(1), {"step": 1}, best={"metric": "eval/pass@1", "value": 0.25})
        store.save(2, write(2), {"step": 2})
        child = os.fork()
        if child == 0:
            die_at(call)
            CheckpointStore(folder, keep=1).save(3, write(3), {"step": 3}, best={"metric": "eval/pass@1", "value": 0.5})
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):  # it finished before the call came: every point has been visited
            assert os.WEXITSTATUS(status) == 0
            shutil.rmtree(folder)
            print(call - 1)
            return
    raise SystemExit("never finished")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
