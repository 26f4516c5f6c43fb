"""Settings of Sphinx for ``make docs``: the repository's Markdown pages as a site, warnings as errors.

The pages are plain Markdown, as a forge shows them. The navigation has the order of the links in the pages of
``INDEXES``.
"""

from __future__ import annotations

import os.path
import re
from typing import Any

project = "rlhf"
copyright = "the authors of rlhf, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "docs/README"
source_suffix = {".md": "markdown"}
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "STABILITY.md",
    "cli/README.md",
    "core/README.md",
    "runtime/README.md",
    "testing/README.md",
    "libraries/*/README.md",
    "deploy/README.md",
    "docs/*.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "benchmarks/gpu/README.md",
    "examples/*/README.md",
    "plugins/*/*/README.md",
]
exclude_patterns = [".*", "runs", "site", "**/node_modules", "**/.*", "**/__pycache__"]
nitpicky = True
html_theme = "furo"
html_title = "rlhf"
html_extra_path = ["site_index"]
html_static_path = ["static"]
html_css_files = ["wide.css"]
html_search_scorer = os.path.join(os.path.dirname(__file__), "static", "headings_first.js")
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 6
myst_enable_extensions = ["strikethrough"]

INDEXES = ("docs/README", "docs/reference/plugins")
"""Pages whose links, heading by heading, make the navigation."""
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+\.md)\)")


def navigation(docname: str, text: str) -> str:
    """Hidden toctrees of the links below each heading of level two. A page is listed where it is linked first."""
    parts, trees, targets = HEADING.split(text), [], set[str]()
    for caption, body in zip(parts[1::2], parts[2::2], strict=True):
        entries = []
        for link in LINK.findall(body):
            target = os.path.normpath(os.path.join(os.path.dirname(docname), link)).removesuffix(".md")
            if target not in targets and target not in INDEXES[:1]:
                entries.append(f"/{target}")
                targets.add(target)
        if entries:
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", *entries, "```"]))
    return "\n\n".join(trees)


def add_navigation(app: Any, docname: str, source: list[str]) -> None:
    if docname in INDEXES:
        source[0] += "\n" + navigation(docname, source[0]) + "\n"


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True}
