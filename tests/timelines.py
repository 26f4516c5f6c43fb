"""Reads ``timeline.json`` as the Trace Event Format says: the array may lack its end."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Slice:
    path: tuple[str, ...]
    """Kind of the track, names of the slices around this one, its name."""
    track: tuple[int, int]
    begin: int
    end: int
    arguments: dict[str, Any]


def events(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n]"):
        text = (text.rpartition(",\n")[0] or "[") + "]"
    found: list[dict[str, Any]] = json.loads(text)
    return found


def slices(found: Sequence[dict[str, Any]], unfinished: bool = False) -> list[Slice]:
    """In the order of their ends. Fails where events of a track are not nested or not in order.

    Args:
        unfinished: slices without an end are allowed.
    """
    names = {e["pid"]: e["args"]["name"] for e in found if e["name" if e["ph"] == "M" else "ph"] == "process_name"}
    made: list[Slice] = []
    open_: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    latest: dict[tuple[int, int], int] = {}
    for event in found:
        track = event["pid"], event["tid"]
        assert event["ts"] >= latest.get(track, 0), "the events of a track are in order"
        latest[track] = event["ts"]
        if event["ph"] == "B":
            open_[track].append(event)
        elif event["ph"] == "E":
            begin = open_[track].pop()
            path = (names[event["pid"]], *(around["name"] for around in open_[track]), begin["name"])
            arguments = begin.get("args", {}) | event.get("args", {})
            made.append(Slice(path, track, begin["ts"], event["ts"], arguments))
    assert unfinished or not any(open_.values())
    return made
