"""Damaged checkpoints, with their old checksums and with new ones: each is a clear error before the first step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_runtime.checkpoint.store import MANIFEST, seal
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
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        node = data
        for part in parents:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
        return data

    return change


def resumed(trained: Workshop, shop: Workshop, algo: str, damage: Callable[[Path], None], *flags: str) -> Finished:
    """Resume a copy of the run whose newest checkpoint was changed by ``damage``."""
    config = trained.config(algo, algo, checkpoint={"every": 2}, **RUNS[algo])
    copy = shutil.copytree(trained.folder / algo, shop.folder / "run")
    folder = Finished(copy, 0).last_checkpoint
    manifest = json.loads((folder / MANIFEST).read_text())
    damage(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    seal(folder, manifest["step"], manifest["meta"], manifest["best"])
    return shop.run_config({**config, "run": {**config["run"], "output": str(copy)}}, "--resume", *flags)


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
    "long": ("sft", "state.json", put("updates", 10**60), "updates: should be less than 9223372036854775808, got int"),
    "unknown": ("sft", "state.json", put("more", 1), "more: unknown, got int 1."),
    "a list": (
        "sft",
        "state.json",
        lambda data: [data],
        "the file: should be a valid dictionary, got list [{'step': 2",
    ),
    "drawn of more": ("sft", "state.json", put("data/order/drawn", [1, 2]), "counts the rows drawn from 2 sources"),
    "nan": ("sft", "state.json", put("data/dropped", {"$float": "nan"}), "data.dropped: should be a valid integer"),
    "null data": ("sft", "state.json", lambda state: {**state, "data": None}, "data: missing."),
    "null stream": ("rloo", "state.json", lambda state: {**state, "stream": None}, "stream: missing."),
    "mark": ("sft", "state.json", put("data/dropped", {"$float": []}), "state.json is not valid JSON"),
    "ready": ("rloo", "state.json", put("stream/ready/0/groups", 3), "it has 4 groups, but state.json counts 3."),
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
        "became dict {'beta': 1.0} when it was loaded",
    ),
    "no beta": ("rloo", "state.json", put("components/algorithm/kl/beta"), "raised KeyError: 'beta'"),
    "reward": ("rloo", "state.json", put("components/reward.reward", {"a": 1}), "load_state_dict() of reward.reward"),
    "negative": ("rloo", "ready.arrow", put("turns/0/ids", [-1]), "with the token -1; allowed: integers >= 0"),
    "trainer": (
        "sft",
        "roles/policy/trainer.json",
        put("updates", "3"),
        "updates: should be a valid integer, got str '3'.",
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
    "no step": ("optimizer", lambda t: t.pop(f"{WEIGHT}/step"), f"{WEIGHT}/step: missing."),
    "more": (
        "optimizer",
        lambda t: t.update({f"{WEIGHT}/more": torch.ones(1)}),
        f"{WEIGHT}/more: unknown; the optimizer",
    ),
    "nan": (
        "model",
        lambda t: t[WEIGHT].view(-1)[3:5].fill_(float("nan")),
        f"{WEIGHT}: 2 of 512 values are NaN or infinite.",
    ),
    "infinity": (
        "optimizer",
        lambda t: t[f"{WEIGHT}/exp_avg"].view(-1)[3].fill_(float("inf")),
        f"{WEIGHT}/exp_avg: 1 of 512 values are NaN or infinite.",
    ),
    "other": ("optimizer", lambda t: t.update({"x/step": torch.ones(())}), "x/step: this model has no parameter 'x'."),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_of_another_kind(trained: Workshop, shop: Workshop, case: str) -> None:
    name, change, says = TENSORS[case]
    run = resumed(trained, shop, "sft", retensor(f"roles/policy/{name}.safetensors", change))
    refused(
        run, f"{name}.safetensors does not contain what a run saves:", says, "Restore it from a copy, remove the folder"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "(char 0). Restore it from a copy, or delete it: a resume creates it again from the checkpoints",
        ),
        ('{"step": "2"}', "best.json does not contain what a run saves:\n  step: should be a valid integer, got str"),
    ],
)
@pytest.mark.parametrize("flag", ["--dry-run", "--run.name=real"])
def test_a_damaged_pointer_to_the_best_is_refused(
    trained: Workshop, shop: Workshop, text: str, says: str, flag: str
) -> None:
    damage = lambda folder: void((folder.parent / "best.json").write_text(text))  # noqa: E731
    refused(resumed(trained, shop, "sft", damage, flag), says)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "",
            "(char 0). Restore it from a copy, or delete it: a resume then looks up the commits",
        ),
        ('{"schema": 2, "starts": []}', "is version int 2, this release reads version 1. Continue with the release"),
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
        "metrics.jsonl has no line for 2 of the steps 1 to 2, the first of them step 1: it was truncated or replaced"
        in run.said
    )


def test_metrics_out_of_order_are_refused(trained: Workshop, shop: Workshop) -> None:
    def turn_round(folder: Path) -> None:
        path = folder.parents[1] / "metrics.jsonl"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))

    refused(resumed(trained, shop, "sft", turn_round), "metrics.jsonl:2 is of step 2, but follows step 3.")


# ---------------------------------------------------------------------------- without new checksums


def content(folder: Path) -> dict[str, bytes | str]:
    """Every file, folder and link of a run."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else str(path.is_symlink())
        for path in sorted(folder.rglob("*"))
        if path.name != ".lock"
    }


def attempt(trained: Workshop, shop: Workshop, *flags: str) -> Finished:
    config = trained.config("sft", "sft", checkpoint={"every": 2})
    return shop.run_config({**config, "run": {**config["run"], "output": str(shop.folder / "run")}}, *flags)


def newer_layout(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "schema": 2}))


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes((folder / name).read_bytes()[:-7]))


def flipped(name: str, position: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[position] ^= 1
        (folder / name).write_bytes(data)

    return damage


def away(folder: Path) -> None:
    folder.rename(folder.parents[2] / "away")
    folder.symlink_to(folder.parents[2] / "not mounted")


def all_away(folder: Path) -> None:
    folder.parent.rename(folder.parents[2] / "away")
    folder.parent.symlink_to(folder.parents[2] / "not mounted")


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


MODEL = "roles/policy/model.safetensors"
SOLE: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "manifest, cut": (cut(MANIFEST), "is not valid JSON"),
    "manifest, no text": (lambda f: void((f / MANIFEST).write_bytes(b"\xff\xfe")), "manifest.json"),
    "manifest, a number": (lambda f: void((f / MANIFEST).write_text("1")), "manifest.json is damaged"),
    "newer layout": (newer_layout, "its layout is version 2, but this release reads version 1"),
    "weights, a bit": (flipped(MODEL, -9), f"{MODEL} has SHA-256"),
    "of another step": (
        lambda f: void(f.rename(f.with_name("step-000009"))),
        "is of step 2, not of the step in the folder's name",
    ),
    "a file": (a_file, "it is not a folder"),
    "a link to nothing": (away, "it is not a folder"),
    "all on a disk that is away": (all_away, "cannot be listed"),
    "all gone": (lambda f: shutil.rmtree(f), "there is no checkpoint in"),
}


@pytest.mark.parametrize("case", SOLE)
def test_a_resume_whose_only_checkpoint_cannot_be_read_changes_nothing(
    trained: Workshop, shop: Workshop, case: str
) -> None:
    damage, says = SOLE[case]
    copy = shutil.copytree(trained.folder / "sft", shop.folder / "run")
    (copy / "model").mkdir()  # as after a first end of the run
    (checkpoint,) = (copy / "checkpoints").glob("step-*")
    damage(checkpoint)
    contents = content(copy)
    for flags in (["--resume", "--dry-run"], ["--resume"], ["--dry-run"], []):
        run = attempt(trained, shop, *flags)
        assert run.code == (1 if "--resume" in flags else 2), run.said
        assert "Traceback" not in run.said
        if "--resume" in flags:
            assert says in run.err
            assert "--overwrite" in run.err or "disk" in run.err
        assert content(copy) == contents
    if case in ("manifest, cut", "newer layout", "a link to nothing", "all on a disk that is away"):
        assert attempt(trained, shop, "--overwrite").code == 0


def test_a_resume_goes_on_from_an_older_checkpoint_when_the_damaged_ones_are_deleted(shop: Workshop) -> None:
    every = {"checkpoint": {"every": 1}}
    baseline = shop.train("sft", "whole", **every)
    run = shop.train("sft", "run", **every)
    shutil.rmtree(run.path / "model")
    cut(MODEL)(run.path / "checkpoints" / "step-000003")
    newer_layout(run.path / "checkpoints" / "step-000002")
    retry = shop.run("sft", "run", "--resume", **every)
    refused(
        retry, "step-000003: ", " bytes, expected ", "step-000002: its layout is version 2", "to continue from step 1"
    )
    assert [line["step"] for line in retry.lines()] == [1, 2, 3]
    for step in (2, 3):
        shutil.rmtree(run.path / "checkpoints" / f"step-00000{step}")
    assert shop.train("sft", "run", "--resume", **every).weights == baseline.weights


def test_a_run_that_saved_something_does_not_start_again_at_step_0(trained: Workshop, shop: Workshop) -> None:
    run = shutil.copytree(trained.folder / "sft", shop.folder / "run")
    shutil.rmtree(run / "checkpoints")
    started = attempt(trained, shop, "--resume", "--dry-run")
    assert started.code == 0, started.said  # a run that was killed before its first checkpoint starts at step 0
    for name in ("model", "exports/step-000002", "checkpoints/best.json"):
        (run / name).mkdir(parents=True)
        for flags in (["--dry-run"], []):
            retry = attempt(trained, shop, "--resume", *flags)
            assert retry.code == 1
            assert f"holds {name}" in retry.err
            assert [line["step"] for line in retry.lines()] == [1, 2, 3]
        shutil.rmtree(run / Path(name).parts[0])


def test_a_dry_run_of_a_resume_reads_the_metrics(trained: Workshop, shop: Workshop) -> None:
    copy = shutil.copytree(trained.folder / "sft", shop.folder / "run")
    (copy / "metrics.jsonl").write_text("[]\n")
    run = attempt(trained, shop, "--resume", "--dry-run")
    refused(run, "metrics.jsonl:1 is not a step's metrics")


@pytest.mark.parametrize("flag", ["--dry-run", "--run.name=real"])
def test_a_resume_reads_the_step_of_the_best_model_before_it_changes_anything(
    trained: Workshop, shop: Workshop, flag: str
) -> None:
    copy = shutil.copytree(trained.folder / "sft", shop.folder / "run")
    (copy / "model-best").mkdir()
    (copy / "model-best" / "best.json").write_text('{"step": ')
    times = {path: path.stat().st_mtime_ns for path in copy.rglob("*.json*")}
    refused(attempt(trained, shop, "--resume", flag), f"or delete {copy / 'model-best'}")
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*.json*")} == times
