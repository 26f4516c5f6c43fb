"""The timeline's file: events of several threads are nested track by track, and a file that breaks off can be read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rlhf_runtime.observe import timeline as module
from rlhf_runtime.observe.timeline import NO_TIMELINE, TimelineFile

from tests.timelines import events, slices

Make = Callable[..., TimelineFile]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    files: list[TimelineFile] = []

    def build(start: int = 1, steps: int = 10) -> TimelineFile:
        files.append(TimelineFile(tmp_path / "timeline.json", start, steps, pytest.fail))
        return files[-1]

    yield build
    for timeline in files:
        timeline.close()


def test_a_complete_file_is_json_with_nested_slices(make: Make, tmp_path: Path) -> None:
    timeline = make()
    timeline.step(0)
    with timeline.phase("learn"), timeline.phase("annotate"):
        timeline.instant("weights", version=1)
    timeline.step(1)
    with timeline.slice("samples", "sample", group=3) as sample:
        with sample.child("turn", turn=0) as turn:
            turn.add(tokens=5)
        sample.add(status="ok")
    timeline.step(None)
    timeline.close()
    content = json.loads((tmp_path / "timeline.json").read_text())
    assert content == events(tmp_path / "timeline.json")
    assert [(s.path, s.arguments) for s in slices(content)] == [
        (("driver", "step 1", "learn", "annotate"), {"step": 1}),
        (("driver", "step 1", "learn"), {"step": 1}),
        (("driver", "step 1"), {}),
        (("samples", "sample", "turn"), {"step": 2, "turn": 0, "tokens": 5}),
        (("samples", "sample"), {"step": 2, "group": 3, "status": "ok"}),
        (("driver", "step 2"), {}),
    ]
    assert [(e["name"], e.get("args")) for e in content if e["ph"] == "i"] == [
        ("weights", {"step": 1, "version": 1}),
        ("end of the timeline", None),
    ]


def test_what_is_under_way_at_the_same_time_is_on_different_tracks(make: Make, tmp_path: Path) -> None:
    timeline = make()
    parent, two, successor = (timeline.slice("samples", name) for name in ("one", "two", "again"))
    with parent as first, two, first.child("a"), first.child("b"):
        pass
    with successor:
        pass
    timeline.close()
    tracks = {s.path[-1]: s.track for s in slices(events(tmp_path / "timeline.json"))}
    assert tracks["one"] == tracks["a"] == tracks["again"]
    assert len({tracks["one"], tracks["two"], tracks["b"]}) == 3


def test_slices_under_way_at_the_end_are_ended_once(make: Make, tmp_path: Path) -> None:
    timeline = make(steps=2)
    with timeline.slice("samples", "sample") as sample, sample.child("turn"):
        for step in range(4):
            timeline.step(step)
    timeline.close()
    spans = slices(json.loads((tmp_path / "timeline.json").read_text()))
    assert [s.path for s in spans] == [
        ("driver", "step 1"),
        ("driver", "step 2"),
        ("samples", "sample", "turn"),
        ("samples", "sample"),
    ]


def test_a_file_without_its_end_can_be_read_and_gone_on_with(make: Make, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = make()
    with timeline.slice("samples", "first"):
        pass
    timeline.close()
    complete = path.read_text()
    middle = complete.index('"first"') + 3
    for cut in (len(complete), len(complete) - 1, len(complete) - 2, middle, complete.index("\n") + 1, 1, 0):
        path.write_text(complete[:cut])
        old_events = events(path)
        resumed = make(start=2)
        with resumed.slice("samples", "second"):
            pass
        resumed.close()
        new_events = json.loads(path.read_text())
        assert new_events[: len(old_events)] == old_events
        assert ("samples, start 2", "second") in [s.path for s in slices(new_events)]


def test_events_are_in_the_file_while_the_run_goes_on(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    timeline = make()
    with timeline.slice("samples", "sample"):
        pass
    deadline = time.monotonic() + 30
    while "sample" not in [e["name"] for e in events(tmp_path / "timeline.json")]:
        assert time.monotonic() < deadline


@pytest.mark.linux("elsewhere there is no /dev/full")
def test_a_full_disk_ends_the_timeline_and_not_the_run(tmp_path: Path) -> None:
    notes: list[str] = []
    timeline = TimelineFile(tmp_path / "timeline.json", 1, 5, notes.append)
    os.dup2(os.open("/dev/full", os.O_WRONLY), timeline._file.fileno())
    timeline.step(0)
    timeline.close()
    timeline.step(1)
    assert len(notes) == 1
    assert "the timeline ends here" in notes[0]


def test_a_run_without_a_timeline_calls_the_same_methods() -> None:
    NO_TIMELINE.step(0)
    with NO_TIMELINE.phase("learn"), NO_TIMELINE.slice("samples", "sample") as sample, sample.child("turn") as turn:
        turn.add(tokens=1)
    NO_TIMELINE.instant("weights", version=1)
    NO_TIMELINE.close()
