"""Reads the imports of a file from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.members import ROOT


class Import:
    """One imported module, with its place."""

    def __init__(
        self, path: Path, node: ast.stmt, module: str, names: tuple[str, ...], typing: bool, top: bool
    ) -> None:
        self.path, self.line, self.module, self.names = path, node.lineno, module, names
        self.typing = typing
        """Under ``if TYPE_CHECKING``: never executed."""
        self.top = top
        """Executed when the module is imported."""
        self.package = module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    def walk(node: ast.AST, typing: bool, top: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(path, child, alias.name, (), typing, top and not typing)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import"
                names = tuple(alias.name for alias in child.names)
                yield Import(path, child, child.module or "", names, typing, top and not typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(ast.Module(child.body, []), True, top)
                yield from walk(ast.Module(child.orelse, []), typing, top)
            elif not isinstance(child, ast.expr):
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
                yield from walk(child, typing, top and not function)

    return tuple(walk(tree(path), False, True))


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def module_name(path: Path, source: Path) -> str:
    """The imports of a file in a package's folder ``source``."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
