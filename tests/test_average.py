"""Runs with a moving average of the weights: the average is evaluated and exported, and does not change training."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest
from rlhf_cli.main import main
from rlhf_runtime.output.metrics import read_metrics

from tests.continuous import check_ledger, simulated
from tests.runs import Finished, Workshop, merged
from tests.test_combinations import COPYING, TEXT, scores


def averaged(shop: Workshop, **changes: Any) -> dict[str, Any]:
    base = {
        "trainer": {"lr": 3e-2, "ema_decay": 0.7},
        "reward": [{"use": f"file:{shop.file('text.py', TEXT)}"}],
        "data": {"eval": str(shop.data)},
        "eval": {"every": 1},
    }
    return merged(base, changes)


def told_of(shop: Workshop, run: Finished, config: dict[str, Any]) -> float:
    """The metrics of `rlhf eval` for the model that a run exported."""
    out = io.StringIO()
    file = shop.arguments(merged(config, {"generator": None, "sync": None}))[1]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["eval", file, "--policy.model", str(run.path / "model"), "--json"]) == 0
    return json.loads(out.getvalue())["reward"]


@pytest.mark.parametrize("stream", [{"staleness": 1}, pytest.param({"round": 2}, marks=pytest.mark.full)], ids=str)
def test_the_last_evaluation_is_that_of_the_exported_model(shop: Workshop, stream: dict[str, int]) -> None:
    """Tested with the generator that samples from the trainer's module, and with one that gets tensors."""
    settings = averaged(shop, stream=stream)
    embedded = shop.train("rloo", "embedded", **settings)
    generator = {"use": f"file:{shop.file('copying.py', COPYING)}"}
    copied = shop.train("rloo", "copied", generator=generator, sync={"canaries": 0}, **settings)
    assert scores(copied) == scores(embedded)
    assert copied.weights == embedded.weights
    for line in read_metrics(copied.path / "metrics.jsonl"):
        assert line.get("time/sync_pause", 0.0) <= line["time/sync"], "without the two syncs of the evaluation"
    expected = told_of(shop, embedded, shop.config("rloo", "embedded", **settings))
    assert scores(embedded)[-1] == expected
    live = shop.train("rloo", "live", **merged(settings, {"eval": {"weights": "live"}}))
    assert scores(live) != scores(embedded)
    assert live.weights == embedded.weights


def test_evaluations_with_the_average_do_not_change_training(shop: Workshop) -> None:
    evaluated = shop.train("rloo", "evaluated", **averaged(shop))
    baseline = shop.train("rloo", "alone", **averaged(shop, data={"eval": None}, eval=None))
    assert evaluated.weights == baseline.weights
    assert evaluated.rollouts() == baseline.rollouts()
    assert (
        evaluated.checkpoint()["roles/policy/model.safetensors"]
        == baseline.checkpoint()["roles/policy/model.safetensors"]
    )


def test_a_loss_on_held_out_rows_is_that_of_the_exported_model(shop: Workshop) -> None:
    settings = averaged(shop, reward=None)
    run = shop.train("sft", "run", **settings)
    exported = str(run.path / "model")
    rerun = shop.train("sft", "again", **merged(settings, {"policy": {"model": exported}, "eval": {"at_start": True}}))
    assert rerun.lines()[0]["eval/loss"] == pytest.approx(run.lines()[-1]["eval/loss"], rel=1e-6)
    live = shop.train("sft", "live", **merged(settings, {"eval": {"weights": "live"}}))
    assert live.lines()[-1]["eval/loss"] != pytest.approx(run.lines()[-1]["eval/loss"], rel=1e-3)


BREAKS = """
from pathlib import Path
from rlhf_plugin_local.generator import TransformersGenerator


class Breaks(TransformersGenerator):
    name = "breaks"

    def generate(self, requests):
        if requests[0].sampling.temperature == 0 and self.version == 2 and Path({marker!r}).exists():
            raise RuntimeError("broke while evaluating")
        return super().generate(requests)
"""


def test_after_an_evaluation_that_breaks_the_trained_weights_are_saved(shop: Workshop) -> None:
    marker = shop.folder / "marker"
    settings = averaged(shop, generator={"use": f"file:{shop.file('breaks.py', BREAKS.format(marker=str(marker)))}"})
    marker.touch()
    broken = shop.run("rloo", "broken", **settings)
    assert broken.code == 1
    assert "generator 'breaks' raised RuntimeError: broke while evaluating" in broken.said
    assert broken.last_checkpoint.name == "step-000002"
    marker.unlink()
    resumed, baseline = shop.train("rloo", "broken", "--resume", **settings), shop.train("rloo", "whole", **settings)
    assert resumed.weights == baseline.weights
    assert resumed.rollouts() == baseline.rollouts()


UNABLE = """
import dataclasses
from rlhf_plugin_simulated.trainer import SimulatedTrainer


class Unable(SimulatedTrainer):
    name = "unable"

    def facts(self):
        return dataclasses.replace(super().facts(), views=("live", "ema"))

    def export(self, path, view="live"):
        super().export(path)
"""


def test_a_trainer_that_cannot_compute_with_its_average_is_refused_before_the_first_step(shop: Workshop) -> None:
    changes = {
        "trainer": {"use": f"file:{shop.file('unable.py', UNABLE)}"},
        "data": {"eval": [{"path": str(shop.data)}]},
        "sync": {"canaries": 0},
    }
    refused = shop.run_config(simulated(shop, "run", **changes))
    assert refused.code == 2
    message = "trainer 'unable' keeps an average of the weights, but cannot compute with it. Set --eval.weights live"
    assert message in refused.said
    shop.train_config(simulated(shop, "live", **changes, eval={"weights": "live"}))


AVERAGED = """
import dataclasses
import json
from rlhf.interfaces import HasViews
from rlhf_plugin_simulated.launcher import SimulatedLauncher
from rlhf_plugin_simulated.pool import SimulatedPool
from rlhf_plugin_simulated.trainer import SimulatedTrainer


class Averaged(HasViews, SimulatedTrainer):
    '''Its average is half a step behind.'''

    name = "averaged"
    view = "live"

    def facts(self):
        return dataclasses.replace(super().facts(), views=("live", "ema"))

    def use_view(self, view):
        self.view = view

    def weights(self, view="live", every_rank=False):
        for name, tensor in super().weights(every_rank=every_rank):
            yield name, tensor - 0.5 * (self.view == "ema")

    def export(self, path, view="live"):
        super().export(path)


class Watched(SimulatedPool):
    '''Writes of each answer whether it was for training, and all weights that were loaded while it was sampled.'''

    weights, under_way = 0.0, {}

    def take(self, bucket):
        super().take(bucket)
        self.coming = float(dict(bucket.tensors)["steps"])

    def end_load(self):
        self.weights = self.coming
        for seen in self.under_way.values():
            seen.append(self.weights)
        return super().end_load()

    async def answer(self, request):
        seen = [self.weights]
        self.under_way[id(seen)] = seen
        try:
            turn = await super().answer(request)
        finally:
            del self.under_way[id(seen)]
        with open({log!r}, "a") as file:
            file.write(json.dumps([request.sampling.temperature > 0, seen]) + "\\n")
        return turn


class Watching(SimulatedLauncher):
    name = "watching"

    def launch_generator(self, generator, config, spec, policy=None, refresh=None):
        return Watched(config, spec)
"""


def test_no_training_sample_of_a_continuous_stream_is_drawn_with_the_average(shop: Workshop) -> None:
    log = shop.folder / "answers.jsonl"
    file = shop.file("averaged.py", AVERAGED.replace("{log!r}", repr(str(log))))
    changes = {
        "data": {"eval": [{"path": str(shop.data)}]},
        "eval": {"every": 2, "temperature": 0.0},
        "stream": {"staleness": 2},
        "launcher": {"use": f"file:{file}:Watching"},
        "generator": {"tokens": 60.0, "tokens_sigma": 0.0, "speed": 20.0},
        "trainer": {"use": f"file:{file}:Averaged"},
        "sync": {"canaries": 0},
    }
    config = simulated(shop, "run", **changes)
    run = shop.train_config(config)
    check_ledger(run, config)
    answers = [json.loads(line) for line in log.read_text().splitlines()]
    trained = [versions for training, versions in answers if training]
    assert all(weights == int(weights) for versions in trained for weights in versions)
    assert any(len(set(versions)) > 1 for versions in trained), "samples are under way when weights come"
    assert {weights for training, versions in answers if not training for weights in versions} == {1.5, 3.5, 5.5}
