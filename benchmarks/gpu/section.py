"""Run one section in a separate process: its end releases the device memory, and a crash does not stop other sections.

Started by run.py; not meant to be called by hand.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--trl-python", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    sys.path.insert(1, str(HERE.parent))  # what the benchmarks on a CPU share is shared here too
    # and with the processes that import the reward function
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "BENCH_DEVICE": arguments.device}
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if arguments.small:  # threads that wait for each other cost more than so little work
            os.environ["OMP_NUM_THREADS"] = "1"

    from parts import Section, write

    if arguments.name == "machine":
        from machine import facts

        write(arguments.result, facts(arguments.device))
        return
    with tempfile.TemporaryDirectory() as folder:
        section = Section(
            arguments.result,
            arguments.device,
            arguments.small,
            Path(folder),
            arguments.shared,
            arguments.trl_python,
            arguments.skip,
            deadline,
        )
        importlib.import_module(arguments.name).run(section)


if __name__ == "__main__":
    main()
