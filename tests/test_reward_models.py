"""Reward models trained on pairs, and their use in transformers, as a reward, and as initial critic."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.runs import Finished, Workshop, assert_same_run

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "x" * (b + 1), "gap": 0.5 * a}
    for a in range(3)
    for b in range(3)
]
OFFLINE = {"sampling": None, "reward": None}


def train(shop: Workshop, output: str, *flags: str, **changes) -> Finished:
    pairs = shop.rows("pairs.jsonl", PAIRS)
    data = {"train": str(pairs), "batch_size": 4, **changes.pop("data", {})}
    return shop.train("reward_model", output, *flags, **OFFLINE, data=data, **changes)


@pytest.fixture(scope="module")
def start(tiny: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that pads with its end token, as many do, and whose config names no pad token."""
    from transformers import AutoTokenizer

    path = tmp_path_factory.mktemp("start") / "model"
    shutil.copytree(tiny.model, path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    return path


@pytest.fixture(scope="module")
def trained(tiny: Workshop, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Evaluated on its own pairs at the end, so that the figures below can be computed again."""
    shop = Workshop(tmp_path_factory.mktemp("rm"), start, tiny.data)
    pairs = [{"path": str(shop.rows("pairs.jsonl", PAIRS)), "name": "held_out"}]
    return train(shop, "run", run={"steps": 6}, trainer={"lr": 5e-3}, data={"eval": pairs})


def score(model: Path, texts: list[str], padding_side: str | None = None) -> torch.Tensor:
    """Scores of transformers, text by text or, with a padding side, as one padded batch."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    module, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    with torch.no_grad():
        if padding_side is not None:
            batch = tokenizer(texts, padding=True, padding_side=padding_side, return_tensors="pt")
            return module(**batch).logits[:, 0]
        return torch.cat([module(**tokenizer(text, return_tensors="pt")).logits[:, 0] for text in texts])


def answers(column: str) -> list[str]:
    return [row["prompt"] + row[column] + "<eos>" for row in PAIRS]


def test_transformers_gives_the_scores_that_the_run_reported(trained: Finished) -> None:
    last = trained.lines()[-1]
    chosen, rejected = (
        score(trained.path / "model", answers("chosen")),
        score(trained.path / "model", answers("rejected")),
    )
    outputs = torch.cat([chosen, rejected]).double()
    assert last["eval/chosen_score"] == pytest.approx(float(chosen.mean()), rel=1e-4, abs=1e-5)
    assert last["eval/rejected_score"] == pytest.approx(float(rejected.mean()), rel=1e-4, abs=1e-5)
    assert last["eval/accuracy"] == pytest.approx(float((chosen > rejected).float().mean()))
    assert last["eval/loss"] == pytest.approx(
        float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), rel=1e-4
    )
    config = json.loads((trained.path / "model" / "config.json").read_text())
    assert config["mean"] == pytest.approx(float(outputs.mean()), rel=1e-4, abs=1e-5)
    assert config["std"] == pytest.approx(float(outputs.std(correction=0)), rel=1e-3)


def test_adapters_are_merged_into_what_transformers_scores(shop: Workshop) -> None:
    pairs = [{"path": str(shop.rows("pairs.jsonl", PAIRS)), "name": "held_out"}]
    run = train(shop, "lora", run={"steps": 3}, trainer={"lr": 5e-3, "lora": {"rank": 2}}, data={"eval": pairs})
    expected = float(score(run.path / "model", answers("chosen")).mean())
    assert run.lines()[-1]["eval/chosen_score"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_scores_padded_batches_alike(trained: Finished, side: str) -> None:
    texts = [*answers("chosen"), "0+1=1234567<eos>", "2"]
    assert torch.allclose(score(trained.path / "model", texts, side), score(trained.path / "model", texts), atol=1e-5)


def test_it_learns(trained: Finished) -> None:
    losses = [line["policy/loss"] for line in trained.lines()]
    assert losses[0] == pytest.approx(math.log(2), abs=0.05), "a fresh head gives nearly equal scores"
    assert losses[-1] < 0.9 * losses[0]


def test_an_exported_reward_model_works_as_reward(shop: Workshop, trained: Finished) -> None:
    model = trained.path / "model"
    run = shop.train("rloo", "run", reward=[{"use": f"model:{model}", "normalise": True}], run={"steps": 1})
    config = json.loads((model / "config.json").read_text())
    samples = list(run.samples())
    expected = score(model, ["".join(_text(turn["ids"], model) for turn in s["turns"]) for s in samples])
    normalised = [(float(v) - config["mean"]) / config["std"] for v in expected]
    assert [s["reward"] for s in samples] == pytest.approx(normalised, rel=1e-3, abs=1e-3)
    assert len({round(s["reward"], 4) for s in samples}) > 3


def _text(ids: list[int], model: Path) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model).decode(ids)


def test_an_exported_reward_model_can_initialise_a_critic(shop: Workshop, trained: Finished) -> None:
    model = trained.path / "model"
    run = shop.train("ppo", "run", critic={"model": str(model), "trainer": {"lr": 0.0}}, run={"steps": 1})
    initial = load_file(model / "model.safetensors")
    still = load_file(run.last_checkpoint / "roles" / "critic" / "model.safetensors")
    assert set(initial) == set(still)
    assert all(torch.equal(initial[name], still[name]) for name in initial)
    learning = shop.train("ppo", "learning", "--critic.model", str(model), run={"steps": 1})
    moved = load_file(learning.last_checkpoint / "roles" / "critic" / "model.safetensors")
    assert any(not torch.equal(initial[name], moved[name]) for name in initial)


def test_training_goes_on_from_a_reward_model(shop: Workshop, trained: Finished) -> None:
    """The first step's loss is that of the model it starts from."""
    model = trained.path / "model"
    run = train(shop, "more", policy={"model": str(model)}, run={"steps": 1}, data={"batch_size": len(PAIRS)})
    d = score(model, answers("chosen")) - score(model, answers("rejected"))
    expected = float(-torch.nn.functional.logsigmoid(d).mean())
    assert run.lines()[0]["policy/loss"] == pytest.approx(expected, rel=1e-4)
    assert expected < 0.6


def test_running_mean_and_std_are_exported_and_resumed(shop: Workshop) -> None:
    """Without evaluation an export has the running mean and deviation; a resumed run ends with the same."""
    settings = {"run": {"steps": 4}, "checkpoint": {"every": 2, "keep": 9, "export_every": 2}}
    baseline, victim = train(shop, "whole", **settings), train(shop, "again", **settings)
    exported = json.loads(next((baseline.path / "exports").glob("*2/config.json")).read_text())
    config = json.loads((baseline.path / "model" / "config.json").read_text())
    assert config["std"] > 0
    assert exported["std"] > 0
    assert exported["mean"] != config["mean"]
    shutil.rmtree(victim.last_checkpoint)
    shutil.rmtree(victim.path / "model")
    resumed = train(shop, "again", "--resume", **settings)
    assert "resumed after step 2" in resumed.said
    assert json.loads((resumed.path / "model" / "config.json").read_text()) == config
    assert_same_run(resumed, baseline)


def test_the_margin_column_changes_the_loss(shop: Workshop) -> None:
    plain, margins = (
        train(shop, "plain", run={"steps": 1}),
        train(shop, "margins", run={"steps": 1}, data={"margin": "gap"}),
    )
    assert plain.lines()[0]["policy/margin"] == margins.lines()[0]["policy/margin"]
    assert margins.lines()[0]["policy/loss"] > plain.lines()[0]["policy/loss"]
