"""The hybrid engine in whole runs: the order in which roles and engines use the devices."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from tests.runs import Workshop
from tests.test_combinations import COPYING

TAKING_TURNS = """
from rlhf.interfaces import ComponentConfig, Sleeps
from rlhf_plugin_local.trainer import TorchTrainerConfig


class Config(ComponentConfig):
    notes: str


class TrainerConfig(TorchTrainerConfig):
    notes: str


def note(self, word):
    with open(self.config.notes, "a") as file:
        file.write(word + "\\n")


def noted(word, method):
    def call(self, *arguments, **named):
        note(self, word)
        return method(self, *arguments, **named)

    return call


class Trainer(TorchTrainer):
    name = "noting"
    Config = TrainerConfig
    update, use_view, save = (noted(w, getattr(TorchTrainer, w)) for w in ("update", "use_view", "save"))
    offload, reload, export = (noted(w, getattr(TorchTrainer, w)) for w in ("offload", "reload", "export"))


class Engine(Sleeps, Copying):
    name = "noting_engine"
    Config = Config

    def __init__(self, config, spec):
        super().__init__(config, spec)
        self.config = config

    generate, begin_load = noted("generate", Copying.generate), noted("load", Copying.begin_load)

    def sleep(self):
        note(self, "sleep")

    def wake(self):
        note(self, "wake")
"""
BEGINNING = ["sleep", "offload", "load"]
"""The calls before the first weights."""
RELOAD = ["sleep", "reload"]
TRAINED = [*RELOAD, "update"]
EVALUATED = [*RELOAD, "use_view", "offload", "load", "wake", "generate", *RELOAD, "use_view"]
"""The calls of an evaluation with the average, after which the live weights are used again."""
STEP = ["wake", "generate", *TRAINED]
ENDS = [*EVALUATED, "save", "export"]
ORDERS = {
    1: [*BEGINNING, *STEP, "offload", "load", *RELOAD, "save", "offload", *STEP, "offload", "load", *ENDS],
    # the batches of a round one after another, and then both updates
    2: [*BEGINNING, "wake", "generate", *STEP, "save", "update", "offload", "load", *ENDS],
}


@pytest.mark.parametrize("round_", [1, 2])
def test_roles_compute_only_with_devices_and_release_them(shop: Workshop, round_: int) -> None:
    """Weights are sent after the optimizer's state was offloaded, and are used until the next phase. Training,
    switching between weights and average, and saving start after the engine was put to sleep."""
    notes = shop.folder / "notes"
    parts = shop.file("parts.py", COPYING + TAKING_TURNS)
    shop.train(
        "rloo",
        "run",
        run={"steps": 2},
        trainer={"use": f"file:{parts}:Trainer", "notes": str(notes), "ema_decay": 0.5},
        generator={"use": f"file:{parts}:Engine", "notes": str(notes)},
        sync={"canaries": 0},
        placement={"generator": {"share": "policy"}},
        stream={"round": round_},
        data={"eval": [{"path": str(shop.data), "max_rows": 2}]},
        eval={"every": 2},
        checkpoint={"every": 1},
    )
    assert turns(notes) == ORDERS[round_]


def test_a_model_is_exported_after_its_state_was_reloaded(shop: Workshop) -> None:
    """Also where no checkpoint is due, and where a resumed run only exports. The average may be in host memory."""
    notes = shop.folder / "notes"
    parts = shop.file("parts.py", COPYING + TAKING_TURNS)
    settings = {
        "run": {"steps": 2},
        "trainer": {"use": f"file:{parts}:Trainer", "notes": str(notes), "ema_decay": 0.5},
        "generator": {"use": f"file:{parts}:Engine", "notes": str(notes)},
        "sync": {"canaries": 0},
        "placement": {"generator": {"share": "policy"}},
        "checkpoint": {"export_every": 1},
    }
    shop.train("rloo", "run", **settings)
    synced = ["offload", "load", *RELOAD]
    assert turns(notes) == [*BEGINNING, *STEP, *synced, "export", "offload", *STEP, *synced, "save", "export"]
    notes.unlink()
    shop.train("rloo", "run", "--resume", **settings)
    assert turns(notes) == [*BEGINNING, *RELOAD, "export"]


def turns(notes: Path) -> list[str]:
    """The recorded calls, without repetitions, because a batch is generated in several waves."""
    return [word for word, _ in groupby(notes.read_text().split())]
