"""``rlhf.train`` inside other programs: a notebook, a script that continues after it, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import cloudpickle
import pytest
import torch
from rlhf.plugins import Plugins
from rlhf_testing.leaks import open_resources

from tests.members import ROOT
from tests.runs import PROMPTS, Workshop
from tests.test_python import OPTIONS, digits, finished, train

NOTEBOOK = ROOT / "examples" / "notebook" / "first_run.ipynb"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files that no other process uses."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def state_of_the_process() -> dict:
    """The state of the process that a run must not change."""
    return {
        "threads": {thread.name for thread in threading.enumerate()},
        "children": open_resources()["child processes"],
        "handlers": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)},
        "environment": dict(os.environ),
        "temporary": set(os.listdir(tempfile.gettempdir())),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "plugins": [str(entry) for entry in Plugins.discover().list()],
        "copied modules": cloudpickle.list_registry_pickle_by_value(),
        "torch threads": torch.get_num_threads(),
        "random state": torch.get_rng_state().tolist(),
    }


def test_two_runs_in_one_process_are_the_same_and_leave_nothing_behind(shop: Workshop):
    threads = torch.get_num_threads()
    options = {**OPTIONS, "run.threads": threads + 1}
    train(shop, "warm", reward=digits, steps=1, options=options).generate(["1+1="])  # libraries keep what they load
    initial = state_of_the_process()
    assert initial["torch threads"] == threads
    first = train(shop, "first", reward=digits, eval_data=PROMPTS[:2], options=options)
    assert first.generate(["1+1="]) == first.generate(["1+1="])
    after = state_of_the_process()
    assert {name: value for name, value in after.items() if value != initial[name]} == {}
    second = train(shop, "second", reward=digits, eval_data=PROMPTS[:2], options=options)
    assert finished(second).lines() == finished(first).lines()
    assert finished(second).weights == finished(first).weights


def test_a_failed_run_leaves_nothing_behind_but_its_folder(shop: Workshop):
    def broken(completions):
        return [1 / 0]

    train(shop, "warm", steps=1)
    initial = state_of_the_process()
    with pytest.raises(Exception, match="ZeroDivisionError"):
        train(shop, "out", reward=broken)
    after = state_of_the_process()
    assert {name: value for name, value in after.items() if value != initial[name]} == {}


def test_ctrl_c_ends_the_run_after_its_step_with_a_checkpoint(shop: Workshop):
    def interrupt(step, metrics, control):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    result = train(shop, "out", steps=5, observers=[interrupt])
    assert (result.status, result.reason) == ("stopped", "SIGINT")
    assert finished(result).last_checkpoint.name == f"step-{len(result.metrics):06d}"
    baseline = train(shop, "whole", steps=5)
    assert finished(train(shop, "out", steps=5, resume=True)).weights == finished(baseline).weights


def test_a_second_ctrl_c_ends_it_at_once(shop: Workshop):
    def interrupt(step, metrics, control):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    handlers = state_of_the_process()["handlers"]
    with pytest.raises(KeyboardInterrupt):
        train(shop, "out", observers=[interrupt])
    assert state_of_the_process()["handlers"] == handlers
    assert train(shop, "again", steps=1).status == "finished"


def test_a_run_within_a_running_event_loop(shop: Workshop):
    import asyncio

    async def cell():
        return train(shop, "inside", steps=2)

    baseline = train(shop, "outside", steps=2)
    assert finished(asyncio.run(cell())).weights == finished(baseline).weights


@pytest.mark.full
def test_the_notebook_runs_and_shows_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real notebook kernel, whose event loop runs while a cell trains."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # other tests in this process may have set it
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # transformers imports torch's compiler, which writes the folder of its cache into the environment
    start = "import os; from transformers import AutoTokenizer; before = dict(os.environ)"
    notebook.cells.insert(0, nbformat.v4.new_code_cell(start))
    notebook.cells += [
        nbformat.v4.new_code_cell("sorted(name for name in os.environ if os.environ[name] != before.get(name))"),
        nbformat.v4.new_code_cell("import asyncio; asyncio.get_running_loop().is_running()"),
    ]
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    displays = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("<table>" in data.get("text/html", "") for data in displays)
    assert [data["text/plain"] for data in displays[-2:]] == ["[]", "True"]
    assert (tmp_path / "runs" / "notebook" / "model" / "model.safetensors").exists()
