"""Output to the terminal, for all three commands."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rlhf_runtime.observe.sample_lines import printable

STATE_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "bold red"}
FILE_WIDTH = 140
"""Characters of a line if the output goes to a file."""


class _Terminal(Console):
    """Escapes control characters in text, because the files of a run may come from anywhere."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def terminal() -> Console:
    """Standard output. Control characters of texts are escaped. Output to a file is wide enough for a table."""
    console = _Terminal(highlight=False, markup=False)
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
