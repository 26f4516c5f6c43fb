"""Writes questions of a task as rows: ``python -m rlhf_plugin_reasoning_gym chain_sum --rows 1000 > rows.jsonl``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rlhf_plugin_reasoning_gym.task import MOST_SEED, GymEntry, check

HASH_SEED = "PYTHONHASHSEED"


def rows(task: str, config: dict[str, Any], seeds: range) -> Iterator[dict[str, Any]]:
    """One row per seed. Sets must have the same order as in worker processes; see :func:`with_hash_seed`."""
    for seed in seeds:
        yield {"prompt": GymEntry(task, config, seed).question, "task": task, "task_config": config, "seed": seed}


def with_hash_seed() -> None:
    """Restart this program with the hash seed of worker processes, because some tasks draw from sets of texts."""
    if os.environ.get(HASH_SEED) is None:
        # sys.argv lacks -m and the options of the interpreter
        os.execve(sys.executable, sys.orig_argv, {**os.environ, HASH_SEED: "0"})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rlhf_plugin_reasoning_gym", description=__doc__)
    parser.add_argument("task", help="name of the task; composite mixes several")
    parser.add_argument("--rows", type=int, default=1000, help="number of questions (default: %(default)s)")
    parser.add_argument(
        "--first-seed", type=int, default=0, help="seed of the first question; it grows by 1 with each further question"
    )
    parser.add_argument("--config", default="{}", help="the task's own options as JSON")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.rows)
    try:
        config = json.loads(args.config)
        if not isinstance(config, dict):
            raise ValueError("--config: a JSON object is expected")
        if not 0 <= seeds.start <= seeds.stop - 1 <= MOST_SEED:
            raise ValueError(f"--rows and --first-seed: at least 1 row, and seeds from 0 to {MOST_SEED}")
        check(args.task, config)
    except ValueError as error:
        parser.error(str(error))
    for row in rows(args.task, config, seeds):
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    with_hash_seed()
    main()
