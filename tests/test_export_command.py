"""`rlhf export RUN`: the model of any kept checkpoint, as the run itself would have written it."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rlhf
import torch
from rlhf_runtime.jobs import export
from safetensors.torch import load_file

from tests.runs import PROMPTS, Finished, Say, Workshop


def equal_folders(folder: Path, expected: Path) -> None:
    names = sorted(str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == names
    assert filecmp.cmpfiles(folder, expected, names, shallow=False)[0] == names


def rises(shop: Workshop, **changes: Any) -> dict[str, Any]:
    """The metric falls, so the first evaluation is the best."""
    held_out = shop.rows("held_out.jsonl", [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(4)])
    base = {"data": {"eval": str(held_out)}, "eval": {"every": 1, "metric": "loss", "mode": "max"}}
    return {**base, "checkpoint": {"every": 1, "export_every": 1}, **changes}


@pytest.mark.parametrize("trainer", [{"lr": 1e-2, "ema_decay": 0.5}, {"lr": 1e-2, "lora": {"rank": 2}}])
def test_a_checkpoints_model_is_that_which_the_run_exported(shop: Workshop, say: Say, trainer: dict[str, Any]) -> None:
    run = shop.train("sft", "run", **rises(shop, trainer=trainer))
    for number, (words, expected) in enumerate(
        [
            (("--step", "2"), "exports/step-000002"),
            (("--step", "3"), "model"),
            (("--best",), "exports/step-000001"),
        ]
    ):
        code, out, err = say("export", run.path, *words, "-o", shop.folder / str(number))
        assert code == 0, err
        assert f"step {(2, 3, 1)[number]}" in out
        equal_folders(shop.folder / str(number), run.path / expected)


def test_the_average_is_the_mean_of_all_kept_checkpoints(
    shop: Workshop, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shop.train("sft", "run", **rises(shop, trainer={"lr": 1e-2}))
    hidden: list[str] = []
    add_to_mean = export._add_to_mean

    def look(folder: Path, exports: Sequence[Path]) -> None:
        hidden.extend(path.name for path in shop.folder.iterdir() if path.name.startswith("."))
        add_to_mean(folder, exports)

    monkeypatch.setattr(export, "_add_to_mean", look)
    code, out, err = say("export", run.path, "--average", "-o", shop.folder / "mean")
    assert code == 0, err
    assert "the mean of steps 1, 2, 3" in out
    card = (shop.folder / "mean" / "README.md").read_text()
    assert "the model with the mean of its weights after steps 1, 2 and 3. Written" in card
    folders = [run.path / name for name in ("exports/step-000001", "exports/step-000002", "model")]
    parts = [load_file(folder / "model.safetensors") for folder in folders]
    for name, tensor in load_file(shop.folder / "mean" / "model.safetensors").items():
        torch.testing.assert_close(tensor, sum(part[name] for part in parts) / 3, rtol=1e-6, atol=1e-7)
    assert sorted(path.name for path in shop.folder.iterdir() if path.name.startswith(".")) == []
    assert hidden == [".saving-mean"], "a process that dies leaves what the next export to the folder deletes"


def test_the_config_of_a_reward_model_is_that_of_its_step(shop: Workshop, say: Say) -> None:
    """Its mean and deviation are the algorithm's state."""
    changes = {"checkpoint": {"every": 1, "export_every": 1}, "data": {"system": "add"}}
    run = shop.train("reward_model", "run", **changes)
    assert say("export", run.path, "--step", 2, "-o", shop.folder / "second")[0] == 0
    equal_folders(shop.folder / "second", run.path / "exports" / "step-000002")
    last = json.loads((run.path / "model" / "config.json").read_text())
    assert json.loads((shop.folder / "second" / "config.json").read_text())["mean"] != last["mean"]


@pytest.fixture(scope="module")
def short(tiny: Workshop) -> Finished:
    return tiny.train("grpo", "short", run={"steps": 1})


def test_an_online_run_is_exported_without_its_data(short: Finished, say: Say, tmp_path: Path) -> None:
    assert say("export", short.path, "--step", 1, "-o", tmp_path / "model")[0] == 0
    equal_folders(tmp_path / "model", short.path / "model")


def test_a_run_with_functions_of_its_process_is_exported(shop: Workshop, say: Say) -> None:
    async def length(prompt: str, completion: str, row: dict[str, Any]) -> float:
        return float(len(completion))

    async def words(prompt: str, completion: str, row: dict[str, Any]) -> float:
        return float(len(completion.split()))

    def watch(step: int, metrics: dict[str, float], control: Any) -> None: ...

    run = shop.folder / "run"
    rlhf.train(
        "grpo",
        model=shop.model,
        data=PROMPTS,
        reward=[length, words],
        observers=watch,
        steps=1,
        output=run,
        options={
            "algorithm.advantage": "gdpo",  # refuses a run with one reward
            "sampling.max_new_tokens": 4,
            "data.batch_size": 4,
            "data.max_tokens": 64,
        },
    )
    code, _, err = say("export", run, "--step", 1, "-o", shop.folder / "model")
    assert code == 0, err
    equal_folders(shop.folder / "model", run / "model")


def test_wrong_usage_is_refused_and_writes_nothing(short: Finished, say: Say, tmp_path: Path) -> None:
    (target := tmp_path / "there").mkdir()
    (target / "file").touch()
    for words, message in (
        (("--step", 7, "-o", tmp_path / "m"), "holds checkpoints of the steps [1]"),
        (("--best", "-o", tmp_path / "m"), "no checkpoint of"),
        (("--average", "-o", tmp_path / "m"), "--average needs two or more checkpoints"),
        (("--step", 1, "-o", target), "exists"),
    ):
        code, _, err = say("export", short.path, *words)
        assert (code, message in err) == (2, True), err
    code, _, err = say("export", target, "--step", 1, "-o", tmp_path / "m")
    assert (code, "no config.toml" in err) == (2, True), err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_damaged_checkpoint_is_refused(shop: Workshop, say: Say) -> None:
    run = shop.train("sft", "run", run={"steps": 1})
    weights = run.path / "checkpoints" / "step-000001" / "roles" / "policy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, _, err = say("export", run.path, "--step", 1, "-o", shop.folder / "m")
    assert (code, "model.safetensors" in err) == (1, True), err
    assert not (shop.folder / "m").exists()
