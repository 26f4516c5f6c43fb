"""Whole runs with the command: every algorithm, the run directory, and reproducibility."""

from __future__ import annotations

import errno
import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.config.load import load
from rlhf_runtime.loop.saves import Saves
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_testing.tiny import tiny_reward_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tests.runs import ALGORITHMS, PROMPTS, Finished, Workshop, assert_same_run

GAME = {"rollout": {"use": "multi_turn"}, "env": {"use": "number_game", "max_turns": 3}}


def held_out(shop: Workshop, **settings: Any) -> dict[str, Any]:
    return {
        "data": {"eval": [{"path": str(shop.data), "name": "held_out", "max_rows": 3}]},
        "eval": {"every": 1, **settings},
    }


def policy(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "roles" / "policy" / "model.safetensors")


# ------------------------------------------------------------------------------------------ every algorithm


@pytest.mark.parametrize(
    ("algorithm", "staleness"), [("sft", 0), ("ppo", 2), *zip(ALGORITHMS, [0, 2] * 3, strict=True)]
)
def test_an_algorithm_runs(shop: Workshop, algorithm: str, staleness: int) -> None:
    changes = {"stream": {"staleness": staleness}} if staleness else {}
    run = shop.train(algorithm, "run", **changes)
    assert ("note: stream.staleness = 2: samples are 2 steps old" in run.said) == bool(staleness)
    lines = run.lines()
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert all(line["policy/grad_norm"] > 0 for line in lines)
    if algorithm != "sft":
        assert [line["stream/version"] for line in lines] == [max(0, k - staleness) for k in range(3)]
        assert len(list(run.samples())) == 3 * 4 * 3
    assert ("critic/loss" in lines[0]) == (algorithm == "ppo")
    assert all("time/step" in json.loads(text) for text in (run.path / "metrics.jsonl").read_text().splitlines())

    recorded = load(str(run.path / "config.toml"), [])
    assert (recorded.algorithm.use, recorded.run.seed, recorded.policy.model) == (algorithm, 1, str(shop.model))
    (start,) = json.loads((run.path / "manifest.json").read_text())["starts"]
    assert algorithm in [plugin["name"] for plugin in start["plugins"]]
    assert (start["total_steps"], start["ended"]["status"], start["ended"]["why"]) == (3, "finished", "")
    assert {"algorithm.use", "run.seed"} <= {*start["options"]} <= {*recorded.origins.options}
    assert run.last_checkpoint.name == "step-000003"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run.path / "model")
    AutoTokenizer.from_pretrained(run.path / "model")
    initial = AutoModelForCausalLM.from_pretrained(shop.model).state_dict()
    trained = policy(run.last_checkpoint)
    assert any(not torch.equal(initial[name], value) for name, value in trained.items())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in trained.items())


# ------------------------------------------------------------------------------------------ reproducible


def test_same_seed_same_run(shop: Workshop) -> None:
    changes = {**GAME, "sampling": {"temperature": 1.3}}
    first, second = (shop.train("grpo", name, **changes) for name in ("one", "two"))
    assert_same_run(first, second)
    other = shop.train("grpo", "other", run={"seed": 2}, **changes)
    assert other.lines() != first.lines()
    assert other.weights != first.weights


@pytest.mark.parametrize("algorithm", ["sft", "ppo"])
def test_the_losses_do_not_depend_on_the_micro_batches(shop: Workshop, algorithm: str) -> None:
    passes = {"epochs": 2, "minibatches": 2, "kl": {"coef": 0.1, "where": "loss"}}
    changes: dict[str, Any] = {"algorithm": passes} if algorithm == "ppo" else {}

    def losses(run: Finished) -> list[tuple[float, ...]]:
        names = [n for n in run.lines()[0] if n.startswith(("policy/", "critic/"))]
        assert {"policy/loss", "policy/grad_norm"} <= set(names)
        return [tuple(line[name] for name in names) for line in run.lines()]

    large = shop.train(algorithm, "large", **changes)
    small = {"micro_tokens": 20}
    critic = {"critic": {**small, "dtype": "fp32"}} if algorithm == "ppo" else {}
    split = shop.train(algorithm, "split", policy=small, **critic, **changes)
    for expected, loss in zip(losses(large), losses(split), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-5)


# ------------------------------------------------------------------------------------------ turns and rewards


def test_a_run_in_an_environment(shop: Workshop) -> None:
    run = shop.train("rloo", "run", **GAME)
    samples = list(run.samples())
    sampled = [[turn for turn in sample["turns"] if turn["sampled"]] for sample in samples]
    assert {len(turns) for turns in sampled} & {2, 3}, "episodes of several turns"
    for sample, turns in zip(samples, sampled, strict=True):
        (digits,) = sample["rewards"].values()
        assert sample["reward"] == pytest.approx(digits["value"] + sum(turn["reward"] for turn in turns))
    assert any(line["reward/std"] > 0 for line in run.lines())


def test_several_weighted_rewards_and_a_reward_model(shop: Workshop) -> None:
    model = tiny_reward_model(shop.folder / "rm", hidden=16, heads=2, kv_heads=1, seed=3)
    base = shop.config("rloo", "run")["reward"]
    rewards = [
        {**base[0], "name": "digits", "weight": 2.0},
        {"use": "math", "weight": 0.5},
        {"use": f"model:{model}", "weight": 0.25},
    ]
    run = shop.train("rloo", "run", reward=rewards)
    weights = {"digits": 2.0, "math": 0.5, "model": 0.25}
    opinions = set()
    for sample in run.samples():
        values = {name: result["value"] for name, result in sample["rewards"].items()}
        assert sample["reward"] == pytest.approx(sum(weights[name] * value for name, value in values.items()))
        opinions.add(values["model"])
    assert len(opinions) > 3


# ------------------------------------------------------------------------------------------ evaluation


def test_evaluation_on_schedule_and_the_best_checkpoint(shop: Workshop) -> None:
    settings = held_out(shop, at_start=True, every=2, samples=2, temperature=1.0)
    run = shop.train("rloo", "run", run={"steps": 4}, checkpoint={"keep": 1, "every": 1}, **settings)
    evaluated = {line["step"]: line for line in run.lines() if "eval/pass@1" in line}
    assert sorted(evaluated) == [0, 2, 4]
    assert {"eval/pass@1", "eval/pass@2", "eval/avg@2", "eval/reward", "eval/length"} <= set(evaluated[4])

    falling = held_out(shop, metric="loss", mode="max")
    sft = shop.train("sft", "sft", run={"steps": 4}, checkpoint={"keep": 1, "every": 1}, **falling)
    losses = [line["eval/loss"] for line in sft.lines()]
    assert losses == sorted(losses, reverse=True)
    store = CheckpointStore(sft.path)
    best = store.best()
    assert best is not None
    assert (best.step, dict(best.best or {})) == (1, {"metric": "eval/loss", "value": losses[0]})
    assert [c.step for c in store.complete()] == [1, 4]


def ended(run: Finished) -> dict[str, str]:
    """The end of the last start in the manifest."""
    return json.loads((run.path / "manifest.json").read_text())["starts"][-1]["ended"]


def test_a_run_that_cannot_write_its_model_failed(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its last step and its last checkpoint. A resume writes the model."""

    def full(self: Saves, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(Saves, "write_model", full)
        run = shop.run("sft", "run")
    assert run.code == 1
    assert (ended(run)["status"], "The disk is full" in ended(run)["why"]) == ("failed", True)
    assert ended(shop.train("sft", "run", "--resume"))["status"] == "finished"


def test_early_stop(shop: Workshop) -> None:
    run = shop.train("sft", "run", run={"steps": 9}, **held_out(shop, metric="loss", mode="max", patience=2))
    assert [line["step"] for line in run.lines()] == [1, 2, 3]
    assert "stopped early: eval/loss has not improved for 2 evaluations" in run.said
    assert run.out.splitlines()[-2] == f"stopped: {run.path}"
    assert ended(run)["status"] == "stopped"
    assert ended(run)["why"].startswith("eval/loss has not improved for 2 evaluations")
    assert run.last_checkpoint.name == "step-000003"
    assert (run.path / "model" / "model.safetensors").exists()
    complete_run = shop.train("sft", "whole", run={"steps": 3}, **held_out(shop, metric="loss", mode="max", patience=2))
    assert "stopped early" not in complete_run.said, "no step was left out"


# ------------------------------------------------------------------------------------------ the stream


def test_filtered_groups_are_replaced(shop: Workshop) -> None:
    run = shop.train("grpo", "run", stream={"filter": {"min_std": 0.2}})
    for line in run.lines():
        assert line["stream/prompts"] == 4 + line["stream/filtered"] - line["stream/short"]
        assert line["stream/short"] == 0
    assert sum(line["stream/filtered"] for line in run.lines()) > 0
    by_group: dict[int, set[float]] = {}
    for sample in run.samples():
        by_group.setdefault(sample["group"], set()).add(sample["reward"])
    assert len(by_group) == 3 * 4
    assert all(len(rewards) > 1 for rewards in by_group.values())


def test_a_run_that_never_updates_fails(shop: Workshop) -> None:
    run = shop.run("rloo", "run", stream={"filter": {"low": 100.0, "max_rounds": 1}})
    assert run.code == 1
    assert "the run made 3 steps and not one update" in run.said
    assert [line["empty"] for line in run.lines()] == [1.0, 1.0, 1.0]
    assert ended(run)["status"] == "failed"
    assert ended(run)["why"].startswith("TrainingError: the run made 3 steps and not one update")
    assert not (run.path / "model").exists()


# ------------------------------------------------------------------------------------------ skipped steps

NOT_FINITE = """
import torch
from rlhf.interfaces import Loss
from rlhf.types import LossOutput, Reduce


class Unstable(Loss):
    name = "unstable"
    calls = 0

    def outputs(self):
        return ("logprobs",)

    def reduce(self):
        return {"nll": Reduce("token_mean")}

    def __call__(self, x):
        self.calls += 1
        value = -x["logprobs"]
        if self.calls in CALLS:
            value = value + torch.sqrt(value * 0)  # finite, but its gradient is not
        return LossOutput({"nll": value})
"""


def unstable(shop: Workshop, calls: str) -> dict[str, Any]:
    file = shop.file("unstable.py", NOT_FINITE.replace("CALLS", calls))
    return {"algorithm": {"loss": {"use": f"file:{file}"}}, "checkpoint": {"every": 1, "keep": 9}}


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(shop: Workshop) -> None:
    run = shop.train("sft", "run", run={"steps": 4}, **unstable(shop, "(2,)"))
    assert [line["policy/skipped"] for line in run.lines()] == [0.0, 1.0, 0.0, 0.0]
    assert all(math.isfinite(value) for line in run.lines() for value in line.values())
    assert "optimizer step skipped (policy: " in run.said
    weights = {step: policy(run.path / "checkpoints" / f"step-{step:06d}") for step in (1, 2, 3)}
    assert all(torch.equal(weights[1][name], weights[2][name]) for name in weights[1])
    assert any(not torch.equal(weights[2][name], weights[3][name]) for name in weights[1])
    (file_of_gradients,) = (run.path / "skipped").iterdir()
    with safe_open(file_of_gradients, "pt") as file:
        assert "finite" in file.metadata()["reason"]
        assert file.get_tensor("lens_B").numel() == 4
        assert file.get_tensor("tok.loss_mask").any()


def test_a_full_disk_where_the_batch_of_a_skipped_step_is_kept(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as broken:
        broken.setattr(RunDirectory, "keep_batch", full)
        run = shop.run("sft", "run", **unstable(shop, "(1,)"))
    assert run.code == 1
    assert f"{run.path / 'skipped'} could not be saved: SafetensorError: " in run.said
    assert "The disk is full" in run.said


def test_a_run_whose_every_step_was_skipped_fails(shop: Workshop) -> None:
    run = shop.run("sft", "run", **unstable(shop, "range(99)"))
    assert run.code == 1
    assert "3 steps and not one update: every step was empty or skipped" in run.said
    assert len(list((run.path / "skipped").iterdir())) == 3


# ------------------------------------------------------------------------------------------ around a run


def test_a_dry_run_loads_no_model_and_writes_nothing(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    run = shop.run("ppo", "run", "--dry-run")
    assert run.code == 0, run.err
    assert not run.path.exists()
    config = tomllib.loads(run.out)
    assert config["algorithm"]["advantage"]["lam"] == 1.0
    assert "# steps: 3, 12 rows per epoch" in run.out
    assert "# role critic:" in run.out
    assert "scalar head, trained, 3 optimizer steps" in run.out


def test_all_observers_see_every_step(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard under the names of TRL, as its section says; W&B's id is in the checkpoint."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    observers = [{"use": "tensorboard", "names": "trl"}, {"use": "wandb", "mode": "offline", "samples_every": 1}]
    run = shop.train("rloo", "run", observer=observers)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    rewards = [line["reward/mean"] for line in run.lines()]
    assert [event.value for event in events.Scalars("train/reward")] == pytest.approx(rewards)
    assert [event.value for event in events.Scalars("train/global_step")] == [1, 2, 3]
    assert "reward/mean" not in events.Tags()["scalars"]
    (offline,) = (run.path / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    state = json.loads((run.last_checkpoint / "state.json").read_text())
    assert state["components"]["observer.wandb"]["run_id"] in offline.name


def test_parameters_that_do_not_learn_are_named(shop: Workshop) -> None:
    """Most characters do not occur in the demonstrations, but every matrix changes; with a rate of 0 none changes."""
    single_step = {"run": {"steps": 1}}
    assert "after the first update" not in shop.train("sft", "run", **single_step).said
    still = shop.train("sft", "still", trainer={"lr": 0.0}, **single_step)
    assert "parameters unchanged after the first update: model.embed_tokens.weight" in still.said
    adapters = shop.train("sft", "lora", trainer={"lora": {"rank": 2}})
    assert "after the first update" not in adapters.said, "A waits for B"


def test_equal_rewards_are_reported_instead_of_parameters(shop: Workshop) -> None:
    """The gradient is 0 until rewards differ. Parameters without a gradient are named only after that."""
    text = "def score(prompt, completion, row):\n    return 1.0\n"
    run = shop.train("grpo", "equal", reward=[{"use": f"file:{shop.file('equal.py', text)}"}])
    assert run.said.count("note: policy: every advantage of this step is 0, so the gradient is 0") == 1
    assert "All rewards that are compared with each other are equal." in run.said
    assert "after the first update" not in run.said
    assert "every advantage" not in shop.train("grpo", "differ", run={"steps": 1}).said


def test_a_reward_that_is_always_none_is_reported(shop: Workshop) -> None:
    text = "def score(prompt, completion, row):\n    return None\n"
    run = shop.run("grpo", "none", reward=[{"use": f"file:{shop.file('none.py', text)}"}])
    assert run.code == 1
    reason = "samples got no reward, because every reward returned None for them"
    assert f"note: step 1: nothing to learn from, no update: 12 {reason}" in run.said
    assert f"rlhf: the run made 3 steps and not one update: 36 {reason}. Look at stream/unscored" in run.err
    assert [line["stream/unscored"] for line in run.lines()] == [12.0] * 3


def test_the_moving_average_is_what_is_exported(shop: Workshop) -> None:
    run = shop.train("sft", "run", trainer={"ema_decay": 0.5, "lr": 1e-2})
    role = run.last_checkpoint / "roles" / "policy"
    exported, live, average = (
        load_file(run.path / "model" / "model.safetensors"),
        load_file(role / "model.safetensors"),
        load_file(role / "ema.safetensors"),
    )
    assert all(torch.equal(exported[name], average[name]) for name in average)
    assert any(not torch.equal(live[name], average[name]) for name in average)


def test_exports_on_schedule(shop: Workshop) -> None:
    run = shop.train("sft", "run", run={"steps": 4}, checkpoint={"export_every": 1, "keep": 2, "save_rollouts": True})
    assert sorted(path.name for path in (run.path / "exports").iterdir()) == ["step-000002", "step-000003"]


def test_epochs_determine_the_number_of_steps(shop: Workshop) -> None:
    run = shop.train("sft", "run", run={"steps": None, "epochs": 1.5})
    assert run.lines()[-1]["step"] == math.ceil(1.5 * len(PROMPTS) / 4)
    assert run.lines()[-1]["epoch"] == pytest.approx(5 * 4 / len(PROMPTS))


LEAVES_OUT_ZERO = """
from rlhf.interfaces import Algorithm, Slot
from rlhf.ops.rows import pack_rows


class LeavesOutZero(Algorithm):
    name = "leaves_out_zero"
    data = "demonstrations"
    slots = {"loss": Slot("loss", "nll")}

    def assemble(self, examples):
        kept = [example for example in examples if example.row["answer"] != "0"]
        return pack_rows(kept), {"rows/left_out": float(len(examples) - len(kept))}
"""


def test_metrics_of_assemble_are_reported_with_a_batch_and_without(shop: Workshop) -> None:
    """One of the twelve rows has the answer 0, so one step has nothing to learn. The schedule counts that step too."""
    algorithm = shop.file("leaves_out.py", LEAVES_OUT_ZERO)
    changes = {"data": {"batch_size": 1}, "run": {"steps": 12}, "trainer": {"schedule": "linear"}}
    run = shop.train("sft", "run", algorithm={"use": f"file:{algorithm}"}, **changes)
    empty = [line["step"] for line in run.lines() if "empty" in line]
    assert len(empty) == 1
    assert [line["step"] for line in run.lines() if line["rows/left_out"] == 1.0] == empty
    for line in run.lines():
        assert ("policy/loss" in line) == (line["step"] not in empty)
        if "policy/lr" in line:
            assert line["policy/lr"] == pytest.approx(1e-3 * (1 - (line["step"] - 1) / 12))


def test_each_phase_of_the_start_and_of_the_first_step_is_a_line(shop: Workshop) -> None:
    run = shop.train("ppo", "phases", **held_out(shop))
    lines = run.err.splitlines()
    model = str(shop.model)
    start = ["reading data", "tokenising held-out rows", f"loading critic: {model}", f"loading policy: {model}"]
    assert sorted(lines[:4]) == sorted(start)
    assert lines[4:13] == [
        "checking rows", "starting the generator transformers", "starting rewards",
        "first sync of weights to the generator", "generating", "learning", "computing log-probs and values",
        "sending weights", "evaluating",
    ]  # fmt: skip
    assert lines.count("evaluating") == 3
    assert set(lines[13:]) == {"evaluating", "saving a checkpoint", "exporting the model"}
