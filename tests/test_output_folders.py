"""Output folders: that of a failed start is replaced, unnamed ones are numbered, and ``--overwrite`` deletes a run."""

from __future__ import annotations

import json
import tomllib
from contextlib import closing

import pytest
import tomli_w
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.main import main
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.loop.run import Run
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.setup.build import build
from rlhf_runtime.setup.prepare import prepare

from tests.runs import Workshop, merged


def test_a_run_that_is_killed_while_it_records_its_start_does_not_block_the_next(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without a manifest is not recognised as that of a run, and nothing in it is replaced."""

    def die(self: RunDirectory, toml: str) -> None:
        write_config(self, toml)
        raise KeyboardInterrupt

    write_config = RunDirectory.write_config
    with monkeypatch.context() as dying:
        dying.setattr(RunDirectory, "write_config", die)
        assert shop.run("sft", "run").code == 130
    shop.train("sft", "run")


def test_a_failed_first_run_does_not_block_the_next(shop: Workshop) -> None:
    failing = shop.file("fails.py", "async def score(prompt, completion, row):\n    raise ValueError('no')\n")
    assert shop.run("rloo", "run", reward=[{"use": f"file:{failing}"}]).code == 1
    assert (shop.folder / "run" / "manifest.json").exists()
    shop.train("rloo", "run", "--dry-run")
    assert shop.train("rloo", "run").weights == shop.train("rloo", "other").weights
    refused = shop.run("rloo", "run", "--dry-run")
    assert refused.code == 2
    assert "already holds a run" in refused.said


def test_overwrite_deletes_a_run_once(shop: Workshop) -> None:
    first = shop.train("sft", "run", run={"steps": 3})
    shop.train("sft", "run", "--dry-run", "--overwrite")
    assert len(first.lines()) == 3
    second = shop.train("sft", "run", "--overwrite", run={"steps": 1})
    assert [line["step"] for line in second.lines()] == [1]
    assert len(json.loads((second.path / "manifest.json").read_text())["starts"]) == 1
    assert "overwrite = false" in (second.path / "config.toml").read_text()
    resumed = shop.train("sft", "run", "--resume", run={"steps": 2})
    assert [line["step"] for line in resumed.lines()] == [1, 2]
    fewer = shop.run("sft", "run", "--resume", run={"steps": 1})
    assert (fewer.code, len(resumed.lines())) == (2, 2)
    assert "a run of 1 steps cannot be resumed after step 2" in fewer.said
    run = shop.run("sft", "run", "--resume", "--overwrite")
    assert run.code == 2
    assert "a run is either continued or deleted" in run.said


def test_a_run_saves_nothing_in_a_folder_that_another_run_has_created_again(shop: Workshop) -> None:
    replacing = """
import pathlib, shutil
from rlhf.interfaces import Observer

class Replacing(Observer):
    name = "replacing"
    def run_started(self, info):
        self.folder = pathlib.Path(info.output)
    def step_finished(self, step, metrics):
        if step == 2:
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            (self.folder / ".lock").write_text("process 1 on another machine")
            (self.folder / "manifest.json").write_text("another run's")
"""
    observer = [{"use": f"file:{shop.file('replacing.py', replacing)}"}]
    run = shop.run("rloo", "run", observer=observer, checkpoint={"every": 1}, run={"report": False})
    assert run.code == 2
    assert "was deleted while this run worked in it, and another run has created it again" in run.said
    assert {file.name for file in run.path.rglob("*")} == {".lock", "manifest.json"}
    assert (run.path / "manifest.json").read_text() == "another run's"


def test_what_is_learnt_after_the_folder_was_deleted_is_saved(shop: Workshop) -> None:
    deleting = """
import shutil
from rlhf.interfaces import Observer

class Deleting(Observer):
    name = "deleting"
    def run_started(self, info):
        self.folder, self.first_step = info.output, info.first_step
    def step_finished(self, step, metrics):
        if step == 1 and not self.first_step:
            shutil.rmtree(self.folder)
"""
    observer = [{"use": f"file:{shop.file('deleting.py', deleting)}"}]
    expected = shop.train("rloo", "whole")
    run = shop.run("rloo", "run", observer=observer, checkpoint={"every": 2})
    assert run.code == 1
    assert "The checkpoints of steps [2, 3] are intact; continue with --resume." in run.said
    resumed = shop.train("rloo", "run", "--resume", observer=observer, checkpoint={"every": 2})
    assert "has no line for 1 of the steps 1 to 3" in resumed.said
    assert resumed.weights == expected.weights


def test_a_plugin_that_changes_the_current_folder_is_named_as_the_cause(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = """
import os
from rlhf.interfaces import Observer

class Moving(Observer):
    name = "moving"
    def rollouts_finished(self, step, groups):
        if step == 2:
            os.makedirs("elsewhere")
            os.chdir("elsewhere")
"""
    monkeypatch.chdir(shop.folder)
    observer = [{"use": f"file:{shop.file('moving.py', moving)}"}]
    config = shop.config("rloo", "run", observer=observer, checkpoint={"every": 1})
    run = shop.run_config({**config, "run": {**config["run"], "output": "run"}})
    monkeypatch.chdir(shop.folder)
    assert run.code == 1
    assert f"run.output run was {shop.folder / 'run'} when the run started" in run.said
    assert "a plugin has changed the current folder of the run (os.chdir)" in run.said
    assert not list((shop.folder / "elsewhere").iterdir())
    assert [line["step"] for line in run.lines()] == [1]


def test_runs_without_a_named_folder_are_numbered(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.folder)
    config = shop.config("sft", "unnamed", run={"steps": 1})
    del config["run"]["output"]
    file = shop.file("unnamed.toml", tomli_w.dumps(config))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "next_examples", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            main(["train", str(file)])
    for number in (1, 2):
        assert main(["train", str(file)]) == 0
        assert (shop.folder / "runs" / "latest").resolve() == shop.folder / "runs" / str(number)
    assert main(["train", str(file), "--steps", "2", "--resume"]) == 0
    assert len((shop.folder / "runs" / "2" / "metrics.jsonl").read_text().splitlines()) == 2
    assert sorted(p.name for p in (shop.folder / "runs").iterdir()) == ["1", "2", "latest"]
    refused = shop.command("train", str(file), "--policy.model", "runs/latest/model")
    assert refused.code == 2
    assert "Name the other run instead: runs/2/model" in refused.said
    assert (shop.folder / "runs" / "latest").resolve() == shop.folder / "runs" / "2"
    assert main(["train", str(file), "--policy.model", "runs/2/model"]) == 0
    third = shop.command("train", str(file), "--policy.model", "runs/latest/model", "--output", str(shop.folder / "a"))
    assert third.code == 0, third.said


def test_starts_at_the_same_time_get_a_folder_each(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are prepared before the first of them claims its folder."""
    monkeypatch.chdir(shop.folder)
    config = shop.config("sft", "unnamed")
    del config["run"]["output"]
    starts = [prepare(RunFile.model_validate(config), Plugins.discover()) for _ in range(3)]
    assert {start.config.run.output for start in starts} == {"runs/1"}
    runs = [build(start, "quiet") for start in starts]
    for number, run in enumerate(runs, 1):
        run.close()
        document = tomllib.loads((shop.folder / "runs" / str(number) / "config.toml").read_text())
        assert run.config.run.output == document["run"]["output"] == f"runs/{number}"
    assert (shop.folder / "runs" / "latest").resolve() == shop.folder / "runs" / "3"


def test_a_named_folder_and_that_of_a_resume_are_refused_while_a_run_is_at_work(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shop.folder)
    config = shop.config("sft", "unnamed", run={"output": "runs/1"})
    unnamed = {**config, "run": {key: value for key, value in config["run"].items() if key != "output"}}
    starts = [prepare(RunFile.model_validate(config), Plugins.discover()) for _ in range(2)]
    with closing(build(starts[0], "quiet")):
        resumed = RunFile.model_validate(merged(unnamed, {"run": {"resume": True}}))
        for start in (starts[1], prepare(resumed, Plugins.discover())):
            with pytest.raises(ConfigError, match="another run of this process is using runs/1"):
                build(start, "quiet")
