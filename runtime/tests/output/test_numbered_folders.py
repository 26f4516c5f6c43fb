"""Folders of runs that name none: numbered, with a link to the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlhf.errors import ConfigError
from rlhf_runtime.output.run_directory import RunDirectory
from rlhf_runtime.output.run_folder import default_folder, link_latest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def started(folder: Path, steps: int = 1) -> RunDirectory:
    directory = RunDirectory.create(folder)
    link_latest(folder)
    directory.write_manifest(0, [], 0)
    if steps:
        directory.metrics.append(steps, {})
    return directory


def test_every_run_gets_a_number_and_the_link_follows():
    for number in ("1", "2", "3"):
        folder = default_folder(takes_newest=False)
        assert folder == Path("runs", number)
        started(folder).close()
        assert Path("runs/latest").resolve() == folder.resolve()
        assert default_folder(takes_newest=True) == folder
    Path("runs/2a").mkdir()
    Path("runs/20").mkdir()
    assert default_folder(takes_newest=False) == Path("runs/20"), "an empty one is free"


def test_a_folder_without_a_finished_step_is_used_again_if_no_run_holds_it():
    failed = started(default_folder(takes_newest=False), steps=0)
    assert default_folder(takes_newest=False) == Path("runs/2"), "it may still be at work"
    failed.close()
    assert default_folder(takes_newest=False) == Path("runs/1")


def test_resuming_without_a_run_is_refused():
    assert default_folder(takes_newest=True) == Path("runs/latest")


def test_a_folder_in_the_place_of_the_link_is_kept():
    started(Path("runs/latest")).close()
    with pytest.raises(ConfigError, match=r"mv runs/latest runs/1.*--output.*--resume.*--overwrite"):
        default_folder(takes_newest=False)
    assert default_folder(takes_newest=True) == Path("runs/latest")
    started(Path("runs/7")).close()
    assert not Path("runs/latest").is_symlink()


def test_folders_elsewhere_get_no_link():
    started(Path("elsewhere/3")).close()
    started(Path("runs/name")).close()
    assert not Path("runs/latest").exists()


def test_a_folder_called_latest_in_which_a_run_starts_is_refused():
    with RunDirectory.create("runs/latest"), pytest.raises(ConfigError, match="runs/latest is a folder with a run"):
        default_folder(takes_newest=False)
    assert default_folder(takes_newest=False) == Path("runs/latest")
