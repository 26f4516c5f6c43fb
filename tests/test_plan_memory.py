"""`rlhf plan` against a real training step of 100 M parameters, in a process of its own: rows of
`benchmarks/plan_memory.py`, within 15 %."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.members import ROOT

WITHIN = 0.15


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("plan_memory", ROOT / "benchmarks" / "plan_memory.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the peak of a phase is read from /proc")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["whole", "checkpointed"])
def test_a_training_step_takes_what_is_planned(benchmark, models, checkpointing):
    """The second step: the first one makes the optimizer's states."""
    case = benchmark.train("100M", 1024, 128, checkpointing) | {"steps": 2}
    row = benchmark.run(case, models)
    assert row["ratio"] == pytest.approx(1, abs=WITHIN), f"planned {row['predicted']}, measured {row['measured']}"
