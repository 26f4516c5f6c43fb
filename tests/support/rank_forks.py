"""``python -m tests.support.rank_forks TRAINER SCRIPT RANKS PORT FOLDER [CASE ...]``: one process per rank.

The processes are forked after all imports. Each runs ``SCRIPT RANK RANKS PORT FOLDER [CASE ...]`` like ``python``, and
writes its output to ``FOLDER/rank-RANK.log``.
The last line of this program's output is the list of their exit codes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

IMPORTED = (
    "peft",
    "safetensors.torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.modeling_qwen3",
    "rlhf_testing.suite_losses",
)
"""Imports of this process, besides the module TRAINER. They start no thread, so that it can be forked."""


def rank(script: str, number: int, words: list[str]) -> None:
    """Run one rank in this fork. Never returns."""
    code = 1
    try:
        log = os.open(str(Path(words[2]) / f"rank-{number}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = [script, str(number), *words]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(trainer: str, script: str, *words: str) -> None:
    for name in (*IMPORTED, trainer):
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads
    gc.freeze()  # DeepSpeed collects garbage for each role of stage 3, which need not look at all that was imported
    children = []
    for number in range(int(words[0])):
        children.append(os.fork())
        if not children[-1]:
            rank(script, number, list(words))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.stdout.write(json.dumps(codes) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the normal exit of a process with these imports takes long


if __name__ == "__main__":
    main(*sys.argv[1:])
