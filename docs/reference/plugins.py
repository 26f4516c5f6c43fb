"""Write ``plugins.md``, the list of the plugins in this repository: ``python docs/reference/plugins.py``.

``tests/test_docs.py`` fails where the page and the code differ.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

PAGE = Path(__file__).parent / "plugins.md"
ROOT = Path(__file__).parents[2]
HEAD = """# Plugins in this repository

<!-- Written by docs/reference/plugins.py: do not edit. -->

Options, papers and deviations from them are on the page of each distribution. `rlhf plugins show NAME` says the same
on the command line, and `rlhf plugins list` shows what is installed.
"""


def page() -> str:
    """Markdown: a table for each folder of ``plugins/``, and those of ``cli/`` and of libraries."""
    parts = [HEAD.rstrip()]
    tables = {folder.name: folder.glob("*/pyproject.toml") for folder in (ROOT / "plugins").iterdir()}
    tables["commands"] = (ROOT / "cli").glob("pyproject.toml")
    tables["libraries"] = (ROOT / "libraries").glob("*/pyproject.toml")
    for name, files in sorted(tables.items()):
        if rows := [text for metadata in sorted(files) if (text := row(metadata))]:
            head = [f"## {name.capitalize()}", "", "| distribution | what | offers |", "|---|---|---|"]
            parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def row(metadata: Path) -> str:
    """Empty for a distribution that registers nothing."""
    project = tomllib.loads(metadata.read_text(encoding="utf-8"))["project"]
    link = f"[{project['name']}](../../{metadata.parent.relative_to(ROOT).as_posix()}/README.md)"
    groups = project.get("entry-points", {})
    offers = [f"{group.removeprefix('rlhf.')} {', '.join(f'`{n}`' for n in groups[group])}" for group in groups]
    return "" if not offers else f"| {link} | {project['description']} | {'; '.join(offers)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
