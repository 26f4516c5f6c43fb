"""What a command is doing, on standard error, while it has no other display.

On a terminal a phase is a line with its time, which is removed at its end. Elsewhere it is one plain line at its start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_open: list[Progress] = []
"""The display of the phase that is shown now; at most one."""


@contextmanager
def phase(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show ``text`` while the code inside runs. A phase inside another one replaces it until it ends.

    Gives ``count(number, total)``, which shows these numbers on a terminal.
    """
    console = Console(file=sys.stderr, highlight=False)
    if not console.is_terminal:
        console.print(text, soft_wrap=True, markup=False)
        yield lambda number, total: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    display = Progress(*columns, console=console, transient=True)
    task = display.add_task(text)
    with hidden():
        _open.append(display)
        display.start()
        try:
            yield lambda number, total: display.update(task, description=f"{text}: {number} of {total}")
        finally:
            display.stop()
            _open.remove(display)


@contextmanager
def hidden() -> Iterator[None]:
    """Remove the line of the phase while the code inside writes to the terminal."""
    display = _open[-1] if _open and _open[-1].live.is_started else None
    if display is not None:
        display.stop()
    try:
        yield
    finally:
        if display is not None:
            display.start()
