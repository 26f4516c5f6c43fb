"""``benchmarks/gpu``: the script works where there is no GPU, keeps what it found, and says what it left out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks/gpu"
SCRIPT = str(FOLDER / "run.py")
LAYOUTS = ("packed, prefixes shared", "packed, prefixes apart", "one by one")


def execute(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_equality_runs_without_a_gpu(tmp_path):
    file = tmp_path / "result.json"
    options = ("--device", "cpu", "--small", "--only", "equality", "--skip", "vllm")
    done = execute("--result", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["machine"]["versions"]["torch"]
    assert result["finished"] >= result["started"]
    assert list(result["sections"]) == ["equality"]
    section = result["sections"]["equality"]
    assert section["status"] == "passed"
    parts = section["parts"]
    assert parts["samples of vllm, bf16"] | {"seconds": 0} == {
        "status": "not run",
        "why": "left out by --skip 'vllm'",
        "seconds": 0,
        "figures": {},
        "checks": [],
    }
    for dtype, least, most in (("fp32", 0.0, 1e-5), ("bf16", 1e-4, 5e-2)):
        figures = parts[f"gradients and log-probs, {dtype}"]["figures"]
        assert set(figures) == {"grpo", "sft"}
        for found in figures.values():
            assert tuple(found) == LAYOUTS
            for one in found.values():  # in bf16 they differ, or it was not computed in bf16
                assert least <= one["gradients apart"] <= most
                assert 0 <= one["log-probs apart, mean"] <= one["log-probs apart, most"]
    samples = parts["samples of transformers"]
    assert samples["status"] == "passed"
    assert all(found["tokens"] == 48 for found in samples["figures"].values())


def test_a_missing_gpu_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = execute("--result", str(tmp_path / "result.json"), "--only", "equality")
    assert done.returncode == 1
    assert "cannot be described, so nothing is run" in done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sections"] == {}
    assert "--device cpu --small" in result["error"]


@pytest.fixture
def parts():
    spec = importlib.util.spec_from_file_location("gpu_parts", FOLDER / "parts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_part_that_fails_is_in_the_file_and_the_others_run(parts, tmp_path):
    section = parts.Section(tmp_path / "section.json", "cpu", True, tmp_path, tmp_path, Path(sys.executable))

    def breaks(part):
        part.figures["so far"] = float("nan")
        raise ValueError("it broke")

    def ends(part):
        sys.exit("a script ended")

    def misses(part):
        part.at_most("error", 0.5, 0.1)

    section.part("breaks", breaks)
    section.part("ends", ends)
    section.part("misses", misses)
    section.part("needs", misses, needs=("no_such_package",))
    section.part("holds", lambda part: part.at_least("share", 0.95, 0.9))
    written = json.loads((tmp_path / "section.json").read_text())["parts"]
    assert {name: part["status"] for name, part in written.items()} == {
        "breaks": "error",
        "ends": "error",
        "misses": "failed",
        "needs": "not run",
        "holds": "passed",
    }
    assert written["breaks"]["error"] == "ValueError: it broke"
    assert "in breaks" in written["breaks"]["traceback"]
    assert written["breaks"]["figures"] == {"so far": "nan"}
    assert written["needs"]["why"] == "no_such_package is not installed"
    assert parts.status_of(written) == "failed"
    assert parts.status_of({name: written[name] for name in ("needs", "holds")}) == "passed"
    assert parts.status_of({"needs": written["needs"]}) == "not run"


def test_a_checkout_need_not_be_installed(tmp_path):
    """-S: without site-packages, where rlhf is installed."""
    code = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
from checkout import use_checkout
assert use_checkout(Path({str(tmp_path)!r}))
import importlib.util
assert importlib.util.find_spec("rlhf") and importlib.util.find_spec("rlhf_plugin_grpo")
from importlib.metadata import entry_points
print(*sorted(e.name for kind in ("trainer", "generator") for e in entry_points(group="rlhf." + kind)))
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env={})
    found = done.stdout.split()
    assert found == ["deepspeed", "fsdp", "simulated", "simulated", "torch", "transformers", "vllm"], done.stderr
