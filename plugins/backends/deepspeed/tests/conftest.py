"""The pair: two processes, one group over gloo, that run every two-rank case once for all tests of this folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for zero_cases

SECONDS = 900


class Ranks:
    """What the two ranks wrote: ``results[rank][case]``, and files below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    def __call__(self, case: str) -> tuple[dict, dict]:
        return self.results[0][case], self.results[1][case]


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    from rlhf.testing.tiny import tiny_model

    folder = tmp_path_factory.mktemp("ranks")
    tiny_model(folder / "model", std=0.2)
    tiny_model(folder / "critic", std=0.2, head="scalar", tied=False)
    tiny_model(folder / "lender", std=0.2, seed=7, hidden=48, heads=4)
    tiny_model(
        folder / "experts",
        architecture="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tied=False,
    )
    one_rank_checkpoint(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = HERE / "zero_pair.py"
    processes = []
    for rank in (0, 1):
        with (folder / f"rank-{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), str(rank), str(port), str(folder)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
    end = time.monotonic() + SECONDS
    try:
        codes = [p.wait(max(1.0, end - time.monotonic())) for p in processes]
    finally:
        for p in processes:
            p.kill()
            p.wait()
    logs = [(folder / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert codes == [0, 0], f"a rank failed:\n--- rank 0\n{logs[0][-4000:]}\n--- rank 1\n{logs[1][-4000:]}"
    return Ranks(folder)


def one_rank_checkpoint(folder: Path) -> None:
    """Two steps on one rank in stage 2, saved for the pair to go on with."""
    from rlhf.testing.suite_losses import TokenLoss
    from zero_cases import batch, spec, trainer

    one = trainer(spec(folder), stage=2, ema_decay=0.9)
    for number in range(2):
        one.update([batch(number)], TokenLoss(), {}, {})
    one.save(folder / "from_one")
