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
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def slices(entries: Sequence[dict[str, Any]]) -> list[Slice]:
    """In the order of their ends. Fails where slices of a track are not nested, or begin at the same time."""
    names = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    around: defaultdict[tuple[int, int], list[Slice]] = defaultdict(list)
    result: list[Slice] = []
    for event in sorted((e for e in entries if e["ph"] == "X"), key=lambda e: e["ts"]):
        track, begin = (event["pid"], event["tid"]), event["ts"]
        open_ = around[track]
        while open_ and open_[-1].end < begin:
            open_.pop()
        path = (*(open_[-1].path if open_ else (names[event["pid"]],)), event["name"])
        slice = Slice(path, track, begin, begin + event["dur"], event.get("args", {}))
        assert not open_ or (open_[-1].begin < begin and slice.end <= open_[-1].end), "the slices are nested"
        open_.append(slice)
        result.append(slice)
    return sorted(result, key=lambda slice: (slice.end, -len(slice.path)))
