"""``benchmarks/gpu``: the script works where there is no GPU, keeps what it found, and says what it left out."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import pytest
from rlhf.errors import PluginVersionMismatch
from rlhf.plugins import Plugins

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
    for dtype, minimum, maximum in (("fp32", 0.0, 1e-5), ("bf16", 1e-4, 5e-2)):
        figures = parts[f"gradients and log-probs, {dtype}"]["figures"]
        assert set(figures) == {"grpo", "sft"}
        for layouts in figures.values():
            assert tuple(layouts) == LAYOUTS
            for comparison in layouts.values():  # in bf16 they differ, or it was not computed in bf16
                assert minimum <= comparison["gradients apart"] <= maximum
                assert 0 <= comparison["log-probs apart, mean"] <= comparison["log-probs apart, most"]
    samples = parts["samples of transformers"]
    assert samples["status"] == "passed"
    assert all(layouts["tokens"] == 48 for layouts in samples["figures"].values())


def test_kernels_determinism_and_training_run_without_a_gpu(tmp_path):
    file = tmp_path / "result.json"
    options = ("--device", "cpu", "--small", "--only", "attention", "determinism", "training", "--skip", "deepspeed")
    done = execute("--result", str(file), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("no predictions")
    result = json.loads(file.read_text())
    assert {name: section["status"] for name, section in result["sections"].items()} == dict.fromkeys(
        ("attention", "determinism", "training"), "passed"
    )
    for part in result["sections"]["attention"]["parts"].values():
        assert set(part["figures"]) == {"sdpa"}
        assert all(0 < part["figures"]["sdpa"][name] < 2e-2 for name in ("out", "dq", "dk", "dv"))
    for part in result["sections"]["determinism"]["parts"].values():
        figures = part["figures"]
        assert figures["tensors"] > 10
        assert (figures["tensors that differ"], figures["not trained"]) == (0, {})
    training = result["sections"]["training"]["parts"]
    reasons = {name: part["why"] for name, part in training.items() if part["status"] == "not run"}
    assert {name.partition(",")[0] for name in reasons} == {
        "attention sdpa",
        "kernels liger",
        "deepspeed stage 2 on one rank",
        "deepspeed stage 3 on one rank",
    }
    assert "--device is cpu" in reasons["attention sdpa, 16 x 1k"]
    for name, part in training.items():
        if name not in reasons and "aside" not in name:
            assert part["figures"]["tokens per second"] > 0
            assert part["figures"]["planned GiB"]["train"] > part["figures"]["planned GiB"]["rest"] > 0


def test_our_steps_are_timed_where_trl_is_not_installed(tmp_path):
    file = tmp_path / "result.json"
    options = ("--device", "cpu", "--small", "--only", "throughput", "--trl-python", "/bin/false")
    left_out = ("vllm", "grpo-natural, without vllm", "sft, TRL's rows padded")
    done = execute("--result", str(file), *options, "--skip", *left_out)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["sections"]["throughput"]["parts"]
    reasons = {name: part["why"] for name, part in parts.items() if part["status"] == "not run"}
    assert list(reasons) == ["the same gradients as TRL", "grpo-forced", "grpo-natural", *left_out[1:]]
    assert "/bin/false does not run" in reasons["the same gradients as TRL"]
    for name in ("sft", "grpo-forced, without vllm"):
        figures = parts[name]["figures"]
        assert figures["TRL is not run"] == reasons["the same gradients as TRL"]
        assert figures["ours, tokens per second"] > 0
        assert len(figures["arms"]["ours"]["phases"]) == len(figures["arms"]["ours"]["seconds"]) == 1


def test_steps_of_a_turn_count_where_they_are_to_be_timed(load):
    turns, (driver, worker) = load("turns"), Pipe()
    for message in ((2, 0), (1, 2), (0, 0)):
        driver.send(message)
    clock = turns.Turns(worker)
    clock.begin()
    for tokens in range(4):
        clock.step(tokens)
    with pytest.raises(turns.Ended):
        clock.step(4)
    assert clock.timed == [False, False, False, True, True]
    result = clock.result()
    assert (result["tokens"], len(result["seconds"])) == ([3, 4], 2)
    assert [driver.recv() for _ in range(3)] == [{}, {}, {}]


def test_trl_gets_the_options_that_the_machine_has(load, parts, tmp_path):
    throughput = load("throughput")
    with pytest.raises(RuntimeError, match="the process ended"):
        throughput.Worker("trl", Path("/bin/false"), tmp_path / "log").ask({}, 20.0)

    def fastest(device, missing, options):
        section = parts.Section(tmp_path / "s.json", device, True, tmp_path, tmp_path, Path("/bin/false"))
        arms = throughput.Arms(section, None, tmp_path)
        assert "does not run" in arms.no_trl
        arms.missing = dict.fromkeys(missing, "absent")
        return arms.fastest(options)

    packed, gpu = throughput.PACKED, "it needs a GPU"
    assert fastest("cuda", (), {}) == ({"options": {"use_liger_kernel": True}}, {})
    job = {"options": {**packed, "use_liger_kernel": True}, "attention": "flash"}
    assert fastest("cuda", (), packed) == (job, {})
    job = {"options": packed, "attention": "flash"}
    assert fastest("cuda", ["liger_kernel"], packed) == (job, {"Liger": "absent"})
    assert fastest("cpu", (), packed) == ({"options": packed}, {"Liger": gpu, "flash attention": gpu})
    engine = throughput.ENGINE
    assert fastest("cuda", (), engine) == ({"options": {**engine, "use_liger_kernel": True}}, {})


@pytest.mark.cluster
def test_a_colocated_run_goes_through_processes_without_ray(tmp_path):
    pytest.importorskip("vllm")
    file = tmp_path / "result.json"
    done = execute("--result", str(file), "--device", "cpu", "--small", "--only", "colocated")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(file.read_text())["sections"]["colocated"]["parts"]
    store = parts.pop("store")
    assert store["status"] == "passed"
    assert len(store["figures"]["steps"]) == 3
    assert store["figures"]["syncs at the first try, share"] == 1
    assert len(parts) == 4
    assert all(part["status"] == "not run" and "--device is cpu" in part["why"] for part in parts.values())


@pytest.mark.cluster
def test_a_run_in_phases_goes_through_ray(tmp_path):
    """Ray's processes import the reward function from the folder of the benchmarks."""
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    file = tmp_path / "result.json"
    parts_to_skip = ("deepspeed", "vllm sleeps, level 1", "vllm sleeps, level 2", "optimizer of torch aside")
    done = execute("--result", str(file), "--device", "cpu", "--small", "--only", "sleep", "--skip", *parts_to_skip)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["sections"]["sleep"]["parts"]["a run in phases on Ray"]["status"] == "passed"


def test_predictions_are_printed_and_compared(load):
    predictions, run, training = load("predictions"), load("run"), load("training")
    assert predictions.of(run.SECTIONS, "cpu", False) == predictions.of(run.SECTIONS, "cuda", True) == []
    expected = predictions.of(["training"], "cuda", False)
    assert {p.part for p in expected} <= {arm.name for arm in training.ARMS}
    assert {p.section for p in predictions.EXPECTED} <= set(run.SECTIONS)
    compared = {comparison.name for comparison in load("throughput").COMPARISONS}
    assert {p.part for p in predictions.of(["throughput"], "cuda", False)} <= compared
    lines = list(predictions.announced(expected))
    assert len(lines) == len(expected) + 2
    assert "tokens per second 21,000 to 26,000" in lines[1]
    assert "11,900" in lines[-1]
    figures = {"tokens per second": 20e3, "MFU %": 20.0}
    sections = {"training": {"parts": {training.DEFAULTS: {"figures": figures}}}}
    rows = predictions.compared(expected, sections)
    assert [(row["measured"], row["true"]) for row in rows[:2]] == [(20e3, False), (20.0, True)]
    assert all(row["measured"] is None and row["true"] is None for row in rows[2:])


def test_a_kernel_that_computes_something_else_fails(load, parts, monkeypatch):
    attention = load("attention")
    row, shape = attention.Row.of(30, 20, 28, 60, "cpu"), attention.Shape(4, 2, 16, window=9)
    right, wrong = parts.Part(), parts.Part()
    attention.check(row, shape, "cpu", right)
    assert all(check["passed"] for check in right.checks)
    other = attention.Options(shape.head_dim**-0.5, 0.0, 8, None)  # a window that is one token shorter
    monkeypatch.setattr(attention, "kernels", lambda *_: {"wrong": partial(attention.stated, row, other)})
    attention.check(row, shape, "cpu", wrong)
    assert [check["passed"] for check in wrong.checks] == [False] * 4 + [True]


def test_fsdp_is_measured_with_an_older_torch(load, monkeypatch):
    def refuse(*_):
        raise PluginVersionMismatch("needs torch>=2.13, found 2.11.0")

    trained = load("trained")
    monkeypatch.setattr(Plugins, "resolve", refuse)
    assert trained.trainer_class("fsdp").name == "fsdp"
    with pytest.raises(PluginVersionMismatch, match="needs torch"):
        trained.trainer_class("torch")


def test_operations_are_those_that_prime_rl_counts(load, tmp_path):
    """Per token of Qwen3-0.6B at 16,384 tokens: 3.6 GFLOP for the matrices, 5.6 for attention."""
    from transformers import Qwen3Config

    training, shapes = load("training"), load("shapes")
    sizes = shapes.QWEN3_06B
    Qwen3Config(
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        intermediate_size=sizes["intermediate"],
        vocab_size=shapes.VOCABULARY,
    ).save_pretrained(tmp_path)
    short, long = (training.operations_per_token(tmp_path, n) for n in (1024, 16384))
    assert long == pytest.approx(9.2e9, rel=0.01)
    assert long - short == 12 * 28 * 1024 * (16384 - 1024)


def test_a_missing_gpu_is_reported_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = execute("--result", str(tmp_path / "result.json"), "--only", "equality")
    assert done.returncode == 1
    assert "cannot be described, so nothing is run" in done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["sections"] == {}
    assert "--device cpu --small" in result["error"]


@pytest.fixture
def load(monkeypatch):
    """Imports a module of the folder, by its short name, for one test."""
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    folder = str(FOLDER.parent)
    for name in [n for n, m in sys.modules.items() if str(getattr(m, "__file__", None)).startswith(folder)]:
        del sys.modules[name]


@pytest.fixture
def parts(load):
    return load("parts")


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
    results = json.loads((tmp_path / "section.json").read_text())["parts"]
    assert {name: part["status"] for name, part in results.items()} == {
        "breaks": "error",
        "ends": "error",
        "misses": "failed",
        "needs": "not run",
        "holds": "passed",
    }
    assert results["breaks"]["error"] == "ValueError: it broke"
    assert "in breaks" in results["breaks"]["traceback"]
    assert results["breaks"]["figures"] == {"so far": "nan"}
    assert results["needs"]["why"] == "no_such_package is not installed"
    assert parts.status_of(results) == "failed"
    assert parts.status_of({name: results[name] for name in ("needs", "holds")}) == "passed"
    assert parts.status_of({"needs": results["needs"]}) == "not run"


def test_a_checkout_need_not_be_installed(tmp_path):
    """-S: without site-packages, where rlhf is installed."""
    code = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
from pathlib import Path
from checkout import use_checkout
assert use_checkout(Path({str(tmp_path)!r}))
import importlib
assert importlib.util.find_spec("rlhf") and importlib.util.find_spec("rlhf_plugin_grpo")
from importlib.metadata import entry_points
print(*sorted(e.name for kind in ("trainer", "generator") for e in entry_points(group="rlhf." + kind)))
"""
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env={})
    generators = ["sglang_server", "simulated", "transformers", "vllm", "vllm_server"]
    assert done.stdout.split() == sorted(["deepspeed", "fsdp", "simulated", "torch", *generators]), done.stderr
