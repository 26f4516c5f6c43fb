"""Tables of text in a terminal, and as one page of HTML that reads nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from rlhf_cli.rewards.trial_tables import TrialTable

LONGEST = 60
"""Characters of a cell in a terminal. The page has whole texts."""
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem }
div { overflow-x: auto }
table { border-collapse: collapse }
th, td { border-bottom: 1px solid #8884; padding: .25rem .75rem .25rem 0; text-align: left; vertical-align: top }
td { max-width: 40rem; overflow-wrap: anywhere; white-space: pre-wrap; font-variant-numeric: tabular-nums }
"""


def as_text(parts: Sequence[TrialTable]) -> str:
    return "\n".join(_table(part) for part in parts)


def as_page(title: str, parts: Sequence[TrialTable]) -> str:
    """A page of HTML. Every text is escaped, and the page may load nothing and run nothing."""
    body = [f"<h1>{html.escape(title)}</h1>"]
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>")
        if part.notes:
            body.append(f"<ul>{''.join(f'<li>{html.escape(note)}</li>' for note in part.notes)}</ul>")
        if part.rows:
            head = "".join(f"<th>{html.escape(column)}</th>" for column in part.columns)
            rows = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in part.rows)
            body.append(f"<div><table><tr>{head}</tr>{rows}</table></div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def _table(part: TrialTable) -> str:
    rows = [part.columns, *part.rows] if part.rows else []
    cells = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(set_cell_size(c, w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([part.title, *(f"  - {note}" for note in part.notes), *(f"  {line}" for line in lines), ""])


def _cell(text: str) -> str:
    """One line, without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text.strip())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
