"""Several processes that are ranks of one gloo group. They run once, and all tests read their results."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

SECONDS = 900


class Ranks:
    """``results[rank][case]``, written by the ranks, and files below ``folder``.

    Args:
        script: run as ``python SCRIPT RANK RANKS PORT FOLDER`` for each rank (:mod:`tests.support.rank_forks`). It
            writes ``FOLDER/rank-RANK.json``: {case: result}.
        trainer: module of the trainer, which is imported once for all ranks.
        cases: further arguments of the script.
    """

    def __init__(self, script: Path, folder: Path, ranks: int, trainer: str, *cases: str) -> None:
        self.folder, self.ranks = folder, ranks
        root = str(Path(__file__).resolve().parents[2])  # for `tests.support`, here and in the ranks
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        # Bound to the end, so that the system gives the port to no other process before rank 0 listens there.
        with socket.socket() as reserved, (folder / "forks.log").open("w") as log:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
            words = [trainer, str(script), str(ranks), str(port), str(folder), *cases]
            command = [sys.executable, "-m", "tests.support.rank_forks", *words]
            forks = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
            try:
                output, _ = forks.communicate(timeout=SECONDS)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(forks.pid, signal.SIGKILL)
                forks.wait()
        assert forks.returncode == 0, (folder / "forks.log").read_text()[-4000:]
        codes = json.loads(output.splitlines()[-1])
        logs = [f"--- rank {rank}\n{(folder / f'rank-{rank}.log').read_text()[-4000:]}" for rank in range(ranks)]
        assert codes == [0] * ranks, "a rank failed:\n" + "\n".join(logs)
        self.results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    def __call__(self, *case: str) -> list[Any]:
        """[rank]: what it returned for a case; the case's name may be given in parts (``"resume", "2"``)."""
        return [results_of_rank["-".join(case)] for results_of_rank in self.results]

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"{name}.safetensors")
