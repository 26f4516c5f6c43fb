"""The line of ``rlhf --help`` about a command, read from its file; nothing is imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from rlhf.plugins import Entry


def one_line_help(entry: Entry) -> str:
    """The first line of the docstring of the module that the entry point names, without the full stop.

    If there is none: the distribution that offers the command, or why it cannot be used.
    """
    if entry.status != "ok":
        return f"({entry.owner}: {entry.status})"
    file = module_file(entry.module)
    try:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) if file else None
    except (OSError, SyntaxError, ValueError) as error:
        return f"({entry.owner}: its module cannot be read: {error})"
    return docstring.splitlines()[0].rstrip(".") if docstring else f"({entry.owner})"


def module_file(module: str) -> Path | None:
    """The source file of a module, found without importing its package; None if there is none."""
    package, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *inner)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None
