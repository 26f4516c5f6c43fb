"""One HTML file about runs, which opens without a network and without a server."""

from __future__ import annotations

import datetime
import html
import json
import math
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import rlhf
from rlhf.errors import ConfigError

from rlhf_runtime.checkpoint.atomic_files import replace_file
from rlhf_runtime.output.run_folder import REPORT, is_report
from rlhf_runtime.report.run_facts import run_facts
from rlhf_runtime.report.run_record import RunRecord
from rlhf_runtime.report.shown_samples import ShownSamples

MOST_PROBLEMS = 30


def report(runs: Sequence[Path], page: Path) -> None:
    """Write the page about ``runs``. After a crash the file is complete or absent.

    Raises ConfigError where a folder holds no run, or ``page`` is a file that is not such a page.
    """
    records = [RunRecord.read(run) for run in runs]
    check_page(page)
    selection = ShownSamples(len(records))
    values: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        samples = selection.of(record, number)
        values.append({**run_facts(record), "samples": samples})
        problems = list(dict.fromkeys(record.problems))
        more = len(problems) - MOST_PROBLEMS
        values[-1]["problems"] = problems[:MOST_PROBLEMS] + ([f"{more} further problems"] if more > 0 else [])
    time = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    data = {"time": time, "version": rlhf.__version__, "prompts": list(selection.prompts), "runs": values}
    title = ", ".join(run["name"] for run in values)
    text = _filled({"title": html.escape(title), "data": script_json(data)})
    replace_file(page, lambda file: file.write(text))


def check_page(page: Path) -> None:
    """Raises ConfigError where ``page`` cannot be written, or is a file of something else."""
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"the page cannot be written to {page}: name a file in a folder that exists.")
    if page.exists() and not is_report(page):
        raise ConfigError(f"{page} is a file that no report wrote, and is not overwritten. Name another one.")


def script_json(value: Any) -> bytes:
    """JSON that can stand in a ``<script>`` element: nothing in it ends the element or begins a comment. Half
    characters, which models do sample, are escaped."""
    form: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
    try:
        text = json.dumps(value, **form)
    except ValueError:
        text = json.dumps(_finite(value), **form)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace")


def _finite(value: Any) -> Any:
    """``value`` with the names of numbers that JSON cannot hold in place of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _filled(texts: dict[str, str | bytes]) -> bytes:
    """The page, with each ``{{name}}`` replaced: by a text, or by the file of that name."""
    assets = files(__package__).joinpath("assets")
    parts = re.split(r"\{\{([\w.-]+)\}\}", assets.joinpath("page.html").read_text(encoding="utf-8"))
    for at in range(1, len(parts), 2):
        text = texts.get(parts[at])
        parts[at] = assets.joinpath(parts[at]).read_text(encoding="utf-8") if text is None else text
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def try_report(run: Path, note: Callable[[str], None]) -> Path | None:
    """Write ``report.html`` in the folder of a run that has ended. Whatever fails is a note: the run is over."""
    page = run / REPORT
    try:
        report([run], page)
    except Exception as error:
        note(f"{page} is not written: {type(error).__name__}: {error}")
        return None
    return page
