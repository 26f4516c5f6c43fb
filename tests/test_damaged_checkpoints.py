"""Checkpoints that were edited, with new checksums: each is a clear error before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_runtime.checkpoint.manifest import MANIFEST, seal
from safetensors.torch import load_file, save_file

from tests.runs import Finished, Workshop, change_rows

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def trained(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Runs that were killed in the third of three steps, by the name of the algorithm."""
    shop = Workshop(tmp_path_factory.mktemp("trained"), tiny.model, tiny.data)
    for algo, changes in RUNS.items():
        run = shop.train(algo, algo, checkpoint={"every": 2}, **changes)
        shutil.rmtree(run.last_checkpoint)
        shutil.rmtree(run.path / "model")
    return shop


RUNS: dict[str, dict[str, Any]] = {
    "rloo": {"stream": {"staleness": 1}, "algorithm": {"kl": {"coef": 0.1, "target": 0.1, "horizon": 1000.0}}},
    "sft": {},
}


def put(path: str, value: Any = None) -> Change:
    """Set the field at a path of names and numbers; None removes it."""

    def change(data: Any) -> Any:
        *above, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        node = data
        for part in above:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
        return data

    return change


def resumed(trained: Workshop, shop: Workshop, algo: str, damage: Callable[[Path], None]) -> Finished:
    """Resume a copy of the run whose newest checkpoint was changed by ``damage``."""
    config = trained.config(algo, algo, checkpoint={"every": 2}, **RUNS[algo])
    copy = shutil.copytree(trained.folder / algo, shop.folder / "run")
    folder = Finished(copy, 0).last_checkpoint
    manifest = json.loads((folder / MANIFEST).read_text())
    damage(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    seal(folder, manifest["step"], manifest["meta"], manifest["best"])
    return shop.run_config({**config, "run": {**config["run"], "output": str(copy)}}, "--resume")


def edit(name: str, change: Change) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        if path.suffix == ".arrow":
            change_rows(path, lambda rows: change(rows[-1]))
        else:
            path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def retensor(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name)

    return damage


def refused(run: Finished, *parts: str) -> None:
    assert run.code == 1, run.said
    assert "Traceback" not in run.said
    for part in parts:
        assert part in run.err
    assert not (run.path / "model").exists()


STATE: Mapping[str, tuple[str, str, Change, str]] = {
    "step of text": ("sft", "state.json", put("step", "2"), "step: should be a valid integer, got str '2'."),
    "no step": ("sft", "state.json", put("step"), "step: missing."),
    "another step": ("sft", "state.json", put("step", 1), "step: 1, but the checkpoint is of step 2."),
    "updates": ("sft", "state.json", put("updates", -1), "updates: should be greater than or equal to 0, got int -1."),
    "long": (
        "sft",
        "state.json",
        put("updates", 10**60),
        "updates: should be less than 9223372036854775808, got int 1000",
    ),
    "components": (
        "sft",
        "state.json",
        put("components", "x"),
        "components: should be a valid dictionary, got str 'x'",
    ),
    "unknown": ("sft", "state.json", put("more", 1), "more: unknown, got int 1."),
    "a list": (
        "sft",
        "state.json",
        lambda data: [data],
        "the file: should be a valid dictionary, got list [{'step': 2",
    ),
    "no data": ("sft", "state.json", put("data"), "data: missing."),
    "no order": ("sft", "state.json", put("data/order"), "data.order: missing."),
    "drawn": ("sft", "state.json", put("data/order/drawn", 3), "data.order.drawn: should be a valid list, got int 3."),
    "drawn of more": ("sft", "state.json", put("data/order/drawn", [1, 2]), "counts the rows drawn of 2 sources"),
    "nan": ("sft", "state.json", put("data/dropped", {"$float": "nan"}), "data.dropped: should be a valid integer"),
    "mark": ("sft", "state.json", put("data/dropped", {"$float": []}), "state.json is not valid JSON"),
    "rows": ("rloo", "state.json", put("stream/rows", []), "stream.rows: should be a valid dictionary, got list []."),
    "ready": ("rloo", "state.json", put("stream/ready/0/groups", 3), "it has 4 groups, and state.json counts 3."),
    "beta": (
        "rloo",
        "state.json",
        put("components/algorithm/kl/beta", "x"),
        "load_state_dict() of algorithm (RLOO), given",
    ),
    "beta text": (
        "rloo",
        "state.json",
        put("components/algorithm/kl/beta", "1"),
        "of which was made dict {'beta': 1.0}",
    ),
    "no beta": ("rloo", "state.json", put("components/algorithm/kl/beta"), "raised KeyError: 'beta'"),
    "reward": ("rloo", "state.json", put("components/reward.reward", {"a": 1}), "load_state_dict() of reward.reward"),
    "ids": ("rloo", "ready.arrow", put("turns/0/ids"), "is not a sample: TypeError: Turn.ids is None; allowed: a"),
    "negative": ("rloo", "ready.arrow", put("turns/0/ids", [-1]), "with the token -1; allowed: integers >= 0"),
    "turns": ("rloo", "ready.arrow", put("turns"), "is not a sample: TypeError"),
    "status": (
        "rloo",
        "ready.arrow",
        put("status", "x"),
        "status: should be 'ok', 'truncated' or 'failed', got str 'x'",
    ),
    "row": ("rloo", "ready.arrow", put("row", -1), "is of another row of the data than the samples before it"),
    "trainer": (
        "sft",
        "roles/policy/trainer.json",
        put("updates", "3"),
        "updates: should be a valid integer, got str '3'.",
    ),
    "coverage": ("sft", "roles/policy/trainer.json", put("coverage", {}), "coverage.without_gradient: missing."),
    "precision": (
        "sft",
        "roles/policy/trainer.json",
        put("precision", 1),
        "precision: should be 'fp32' or 'bf16', got int 1.",
    ),
}


@pytest.mark.parametrize("case", STATE)
def test_a_value_of_another_kind(trained: Workshop, shop: Workshop, case: str) -> None:
    algo, name, change, says = STATE[case]
    refused(resumed(trained, shop, algo, edit(name, change)), name, says)


WEIGHT = "model.layers.0.mlp.up_proj.weight"
TENSORS: Mapping[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = {
    "weight": ("model", lambda t: t.update({WEIGHT: t[WEIGHT].bfloat16()}), f"{WEIGHT}: a tensor of torch.bfloat16"),
    "moment": (
        "optimizer",
        lambda t: t.update({f"{WEIGHT}/exp_avg": t[f"{WEIGHT}/exp_avg"].double()}),
        f"{WEIGHT}/exp_avg: torch.float64 of shape (32, 16), expected torch.float32 of shape (32, 16).",
    ),
    "step": (
        "optimizer",
        lambda t: t.update({f"{WEIGHT}/step": torch.ones(2)}),
        f"{WEIGHT}/step: torch.float32 of shape (2,), expected torch.float32 of shape ().",
    ),
    "no step": ("optimizer", lambda t: t.pop(f"{WEIGHT}/step"), f"{WEIGHT}/step: missing."),
    "nothing": ("optimizer", lambda t: t.clear(), "model.embed_tokens.weight/step: missing."),
    "more": (
        "optimizer",
        lambda t: t.update({f"{WEIGHT}/more": torch.ones(1)}),
        f"{WEIGHT}/more: unknown; the optimizer",
    ),
    "other": ("optimizer", lambda t: t.update({"x/step": torch.ones(())}), "x/step: this model has no parameter 'x'."),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_another_kind(trained: Workshop, shop: Workshop, case: str) -> None:
    name, change, says = TENSORS[case]
    run = resumed(trained, shop, "sft", retensor(f"roles/policy/{name}.safetensors", change))
    refused(
        run, f"{name}.safetensors does not hold what a run saves:", says, "Restore it from a copy, remove the folder"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "best.json does not hold what a run saves:\n  the file: should be a valid dictionary, got list []."),
        ('{"step": "2"}', "step: should be a valid integer, got str '2'."),
    ],
)
def test_a_damaged_pointer_to_the_best_is_refused(trained: Workshop, shop: Workshop, text: str, says: str) -> None:
    refused(resumed(trained, shop, "sft", lambda folder: void((folder.parent / "best.json").write_text(text))), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1", "manifest.json does not hold what a run saves:\n  the file: should be a valid dictionary, got int 1."),
        ('{"starts": [{"hub": {"a": 1}}]}', "starts.0.hub.a: should be a valid string, got int 1."),
    ],
)
def test_a_manifest_that_is_not_of_a_run_is_refused(trained: Workshop, shop: Workshop, text: str, says: str) -> None:
    refused(resumed(trained, shop, "sft", lambda folder: void((folder.parents[1] / MANIFEST).write_text(text))), says)


def void(_: object) -> None:
    return


def test_missing_metrics_are_reported_on_resume(trained: Workshop, shop: Workshop) -> None:
    run = resumed(trained, shop, "sft", lambda folder: void((folder.parents[1] / "metrics.jsonl").write_text("")))
    assert run.code == 0, run.said
    assert (
        "metrics.jsonl has no line of 2 of the steps 1 to 2, the first of them step 1: it was cut or replaced"
        in run.said
    )


def test_metrics_out_of_order_are_refused(trained: Workshop, shop: Workshop) -> None:
    def turn_round(folder: Path) -> None:
        path = folder.parents[1] / "metrics.jsonl"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    refused(resumed(trained, shop, "sft", turn_round), "metrics.jsonl:2 is of step 2, behind step 3.")
