"""Runs that fail after finished steps: nothing of these is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

import pytest
from rlhf.errors import SyncError
from rlhf.interfaces import Proof
from rlhf_cli.main import main
from rlhf_plugin_local.generator import TransformersGenerator
from rlhf_runtime.checkpoint.store import CheckpointStore

from tests.forks import Forks
from tests.runs import REWARD, Finished, Workshop, assert_same_run
from tests.test_bad_input import refused

BROKEN = """
import os
from rlhf.interfaces import Advantage
from rlhf.ops.returns import return_to_go

class Broken(Advantage):
    def returns(self, R_NA, mask_NA, values_NA, boot_N):
        self.calls = getattr(self, "calls", 0) + 1
        assert self.calls < 3 or not os.path.exists({marker!r}), "broke in the third step"
        G_NA = return_to_go(R_NA, mask_NA, 1.0)
        return G_NA, G_NA
"""


def test_finished_steps_are_saved_when_a_step_fails_before_its_update(shop: Workshop) -> None:
    marker = shop.folder / "broken"
    advantage = shop.file("broken.py", BROKEN.format(marker=str(marker)))
    algorithm = {"algorithm": {"advantage": {"use": f"file:{advantage}"}}}
    baseline = shop.train("rloo", "whole", **algorithm)
    marker.touch()
    broken = shop.run("rloo", "run", **algorithm)
    refused(broken, "broke in the third step", code=1)
    assert [c.step for c in CheckpointStore(broken.path).complete()] == [2]
    marker.unlink()
    assert_same_run(shop.train("rloo", "run", "--resume", **algorithm), baseline)


WRONG_LOSS = """
from rlhf.interfaces import Loss
from rlhf.types import LossOutput, Reduce

class Wrong(Loss):
    name = "wrong"

    def outputs(self):
        return ("logprobs",)

    def reduce(self):
        return {"nll": Reduce("token_mean")}

    def __call__(self, x):
        return LossOutput({"nll": x["logprobs"] + x["logprobs"].new_zeros(10_000)})
"""


def test_a_loss_that_raises_is_named_without_a_traceback(shop: Workshop) -> None:
    loss = {"algorithm": {"loss": {"use": f"file:{shop.file('wrong.py', WRONG_LOSS)}"}}}
    message = "the update of 'policy' with the loss 'wrong' raised RuntimeError: The size of tensor a"
    error = refused(shop.run("sft", "wrong", **loss), message, code=1)
    assert "wrong.py:15)" in error
    held_out = {"data": {"eval": str(shop.data)}, "eval": {"at_start": True}}
    refused(shop.run("sft", "held_out", **loss, **held_out), "the evaluation of 'policy' with the loss 'wrong'", code=1)


@pytest.mark.parametrize("algorithm", ["rloo", "sft"])
def test_a_step_is_saved_when_its_sync_fails(shop: Workshop, monkeypatch: pytest.MonkeyPatch, algorithm: str) -> None:
    evaluated = {"data": {"eval": str(shop.data)}, "eval": {"every": 2, "metric": "pass@1"}}
    evaluated |= {"reward": shop.config("rloo", "whole")["reward"], "sampling": {"max_new_tokens": 6}}
    baseline = shop.train(algorithm, "whole", **evaluated)
    load = TransformersGenerator.load

    def refuse(self: TransformersGenerator, module: object, version: int) -> Proof:
        if version == 2:
            raise SyncError("the canaries differ")
        return load(self, module, version)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersGenerator, "load", refuse)
        broken = shop.run(algorithm, "broken", **evaluated)
    refused(broken, "the canaries differ", code=1)
    assert "saved what was learnt in 2 steps" in broken.said
    retry = shop.train(algorithm, "broken", "--resume", **evaluated)
    assert retry.weights == baseline.weights
    for line, expected in zip(retry.lines(), baseline.lines(), strict=True):
        assert {**line, "sync/version": 0} == {**expected, "sync/version": 0}


def test_a_resume_may_add_an_evaluation(shop: Workshop) -> None:
    shop.train("sft", "run", run={"steps": 2})
    longer = shop.train("sft", "run", "--resume", data={"eval": str(shop.data)}, run={"steps": 3})
    assert "data.eval" in longer.said
    assert "eval/loss" in longer.lines()[-1]


def test_finished_steps_are_saved_after_a_failure(shop: Workshop) -> None:
    """A reward fails in the third step of a run that saves its only checkpoint at the end."""
    marker = shop.folder / "down"
    text = REWARD.replace("async def", "import os\nasync def").replace(
        "    digits",
        f"    assert not (row['answer'] == '5' and os.path.exists({str(marker)!r})), 'server is down'\n    digits",
    )
    reward = {"reward": [{"use": f"file:{shop.file('down.py', text)}"}], "data": {"shuffle": False}}
    baseline = shop.train("rloo", "whole", **reward)
    marker.touch()
    broken = shop.run("rloo", "broken", **reward)
    refused(broken, "server is down", code=1)
    assert [line["step"] for line in broken.lines()] == [1, 2]
    assert [c.step for c in CheckpointStore(broken.path).complete()] == [2]
    assert "saved what was learnt in 2 steps" in broken.said
    marker.unlink()
    assert_same_run(shop.train("rloo", "broken", "--resume", **reward), baseline)


def test_a_disk_without_space_for_a_checkpoint_is_refused_before_the_first_step(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(shop.folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    run = shop.run("sft", "run")
    refused(run, "0.0 GiB of free space, and a checkpoint takes at least", code=1)
    assert not (run.path / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def whole(tiny: Workshop) -> Finished:
    """What a run with a full disk must end as, when it goes on."""
    return tiny.train("rloo", "whole", run={"steps": 4}, checkpoint={"every": 2})


@pytest.mark.parametrize(
    "kilobytes", [pytest.param(1, marks=pytest.mark.full), 5, pytest.param(12, marks=pytest.mark.full)]
)
def test_a_full_disk(forks: Forks, shop: Workshop, whole: Finished, kilobytes: int) -> None:
    """No file can grow beyond a size that a checkpoint, the samples of a step or the metrics exceed."""
    run = shop.config("rloo", "run", run={"steps": 2}, checkpoint={"every": 2})
    first = forks.start(shop.arguments(run))
    assert first.wait() == 0
    run["run"]["steps"] = 4
    full = forks.start(shop.arguments(run, "--resume"), limits={"RLIMIT_FSIZE": kilobytes * 1024})
    assert full.wait() == 1, full.output
    assert "Traceback" not in full.output
    assert "could not be" in full.output
    assert "The disk is full" in full.output
    store = CheckpointStore(shop.folder / "run")
    assert [c.step for c in store.complete()] == [2]
    assert store.open(2).damage() == ""
    assert not list(store.root.glob(".saving-*"))
    retry = forks.start(shop.arguments(run, "--resume"))
    assert retry.wait() == 0, retry.output
    assert Finished(shop.folder / "run", 0).lines() == whole.lines()
    assert Finished(shop.folder / "run", 0).weights == whole.weights


@pytest.mark.parametrize("folder", ["rollouts", "evaluations"])
def test_a_folder_of_records_that_cannot_be_made(shop: Workshop, folder: str) -> None:
    """A file in its place stands for a disk without space for another folder."""
    text = REWARD.replace("    digits", f"    open({str(shop.folder / 'run' / folder)!r}, 'a').close()\n    digits")
    changes = {"data": {"eval": str(shop.data)}, "eval": {"at_start": folder == "evaluations"}}
    run = shop.run("rloo", "run", reward=[{"use": f"file:{shop.file('blocks.py', text)}"}], **changes)
    refused(run, f"{folder}/step-00000", "could not be saved", "start the run again", code=1)


@pytest.mark.linux("elsewhere there is no /dev/full")
@pytest.mark.parametrize(("fault", "flag"), [("full disk", "--json"), ("closed pipe", "--traceback")])
def test_a_run_goes_on_where_its_output_cannot_be_written(
    shop: Workshop, whole: Finished, fault: str, flag: str
) -> None:
    arguments = shop.arguments(shop.config("rloo", "run", run={"steps": 4}, checkpoint={"every": 2}), flag)
    path: str | int = "/dev/full"
    if fault == "closed pipe":
        reader, path = os.pipe()
        os.close(reader)
    with open(path, "w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        assert main(arguments) == 0
    assert_same_run(Finished(shop.folder / "run", 0), whole)


def test_a_replay_goes_on_where_its_output_cannot_be_written(shop: Workshop, whole: Finished) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, contextlib.redirect_stdout(stream):
        assert main(["replay", str(whole.path), "-o", str(shop.folder / "replay")]) == 0
    assert Finished(shop.folder / "replay", 0).weights == whole.weights


def test_a_run_stops_with_a_checkpoint_where_its_terminal_is_closed(shop: Workshop, forks: Forks) -> None:
    arguments = shop.arguments(shop.config("rloo", "run", run={"steps": 10_000}, checkpoint={"every": 10_000}))
    process, terminal = forks.start_in_terminal(arguments)
    run = Finished(shop.folder / "run", 0)
    while not (run.path / "metrics.jsonl").exists() or len(run.lines()) < 2:
        os.read(terminal, 2**16)
    os.close(terminal)  # the system sends SIGHUP, and refuses further writes
    assert process.wait() == 128 + signal.SIGHUP
    assert [c.step for c in CheckpointStore(run.path).complete()] == [len(run.lines())]
