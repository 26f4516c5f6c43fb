"""`rlhf plan` against real training steps of 100 M parameters, in processes of their own: rows of
`benchmarks/plan_memory.py`, within 15 %. The benchmark has the other shapes, roles, engines and whole runs."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.members import ROOT

WITHIN = 0.15


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("plan_memory")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the peak of a phase is read from /proc")
@pytest.mark.parametrize(
    "where", ["embedded", "adapters", pytest.param("two ranks of ZeRO-3", marks=pytest.mark.cluster)]
)
def test_a_training_step_takes_what_is_planned(benchmark, models, where):
    """The second step: the first one makes the optimizer's states."""
    from planned.cases import LORA, train, zero

    case = zero(3, "100M", 64, 64) if "ZeRO" in where else train("100M", 256, 128, False)
    if where == "adapters":
        case |= {"lora": LORA}
    row = benchmark.run(case, models)
    assert row["ratio"] == pytest.approx(1, abs=WITHIN), f"planned {row['predicted']}, measured {row['measured']}"
