"""Write ``migrate-*.md``, the tables of ``rlhf migrate``: ``python docs/reference/migrate.py``.

``tests/test_docs.py`` fails where the pages and the tables differ.
"""

from __future__ import annotations

from pathlib import Path

from rlhf_cli.migrate.find import FRAMEWORKS
from rlhf_cli.migrate.rows import OptionRow, table

FOLDER = Path(__file__).parent
HEAD = """# From {name}

<!-- Written by docs/reference/migrate.py from the tables of rlhf migrate: do not edit. -->

What becomes of the options of {name}. [`rlhf migrate`](../how-to/migrate.md) uses these tables. An option has the same
value here unless the last column says otherwise. A default of {name} that differs from ours is written to the run file.
{facts}
"""


def pages() -> dict[Path, str]:
    """{path: Markdown}: a page for each framework, with a table for each group of options."""
    return {FOLDER / f"migrate-{key}.md": page(key) for key in FRAMEWORKS}


def page(key: str) -> str:
    framework = FRAMEWORKS[key]
    parts = [HEAD.format(name=framework.NAME, facts=framework.FACTS).rstrip()]
    for group, rows in table(key).items():
        lines = [f"## {framework.GROUP_TITLES[group]}", "", "| option | default | here | |", "|---|---|---|---|"]
        parts.append("\n".join([*lines, *map(line, rows)]))
    return "\n\n".join(parts) + "\n"


def line(row: OptionRow) -> str:
    name = f"`{row.name}`" + (f"<br>{', '.join(f'`{old}`' for old in row.old)}" if row.old else "")
    default = "" if row.default is None else code(row.default)
    default += "".join(f"<br>{entry}: {code(value)}" for entry, value in row.defaults.items())
    values = ", ".join(f"`{theirs}`: {code(ours) if ours != '' else 'not set'}" for theirs, ours in row.values.items())
    earlier = f"default of earlier versions: {row.earlier}" if row.earlier else ""
    meaning = "; ".join(part for part in (row.why, row.rule or row.doc, values, earlier) if part).replace("|", "\\|")
    here = "<br>".join(f"`{path}`" for path in row.to)
    return f"| {name} | {default.removeprefix('<br>')} | {here} | {meaning} |"


def code(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value).replace("\n", "\\n")
    return f"`{text}`" if text.strip() else "empty"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
