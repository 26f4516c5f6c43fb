"""The command line of the scripts that compute the cases for one side. Standard library only: both Python environments
import it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import write


def answer(doc: str, cases: Sequence[Any], function: Callable[[Any, Path], Any], packages: Sequence[str]) -> None:
    """Write ``{"versions": {package: version}, "cases": {name: found(case, folder)}}`` for the cases of --cases."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder of what tiny.py or rows.py made")
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--cases", nargs="+", help="names; all where absent")
    arguments = parser.parse_args()
    selection = [case for case in cases if not arguments.cases or case.name in arguments.cases]
    answers = {case.name: function(case, arguments.work) for case in selection}
    write(arguments.result, {"versions": {name: version(name) for name in packages}, "cases": answers})
