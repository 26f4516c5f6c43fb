"""Output to the terminal, for all three commands."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

STATE_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "bold red"}
FILE_WIDTH = 140
"""Characters of a line if the output goes to a file."""


def terminal() -> Console:
    """Standard output. Output to a file is wide enough for a table."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def has_colour(console: Console) -> bool:
    return console.is_terminal and not console.no_color


def table(*columns: str, title: str | None = None) -> Table:
    """A table without a frame; columns whose name begins with ``>`` are aligned to the right."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        grid.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return grid
