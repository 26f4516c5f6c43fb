"""Who may import whom, read from the source; and what a file may look like."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import importlib_metadata
import pytest
from packaging.utils import canonicalize_name

from tests.members import BY_NAME, MEMBERS, PLUGINS, ROOT, name_of

CORE = ROOT / "core" / "src" / "rlhf"
CLI = ROOT / "cli" / "src" / "rlhf_cli"
HEAVY = {"torch", "transformers", "datasets", "numpy", "pandas", "peft", "sympy"}

HEAVY_MODULES = {"policy_gradient", "policy_gradient_config", "serialise"}
"""Modules directly in ``rlhf`` that belong to runs, which may import torch; all others stay light."""
LIGHT = {"interfaces", "plugins", "types"} | {p.stem for p in CORE.glob("*.py")} - HEAVY_MODULES
"""What plugin authors and the command line import."""
LIGHT_THIRD_PARTIES = {"pydantic", "pydantic_core", "pluggy", "packaging", "importlib_metadata", "tomli_w"}
OPS_THIRD_PARTIES = {"torch", "pydantic"}
OPS_ROOMS = {"ops", "types", "errors", "interfaces"}

ALGORITHMS = {
    *(
        [
            "ppo",
            "grpo",
            "rloo",
            "reinforce",
            "sft",
            "dpo",
            "kto",
            "gspo",
            "cispo",
            "dapo",
            "remax",
            "orpo",
            "simpo",
            "ipo",
            "prm",
        ]
    ),
    *(name for m in PLUGINS for kind, name, _ in m.entry_points if kind == "algorithm"),
} - {"reward_model"}
"""All but the one that is also the name of what it trains, which the core holds and makes small ones of."""

WHERE = ("core", "cli", "plugins", "tests", "benchmarks", "examples", "docs")


class Import:
    """One imported module, with where and how."""

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


def imports(path: Path) -> Iterator[Import]:
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
            else:
                function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, typing, top and not function)

    yield from walk(tree(path), False, True)


def python_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*.py") if "__pycache__" not in p.parts)


def is_third_party(found: Import) -> bool:
    return found.package not in sys.stdlib_module_names and found.package not in {m.package for m in MEMBERS}


def room(path: Path) -> str:
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = ("rlhf", *path.relative_to(CORE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def rooms_imported(found: Import) -> list[str]:
    """Rooms of core that an import reaches: ``from rlhf import errors`` and ``import rlhf.errors`` are the same."""
    parts = found.module.split(".")
    if parts[0] != "rlhf":
        return []
    if len(parts) > 1:
        return [parts[1]]
    rooms = {p.name.removesuffix(".py") for p in CORE.iterdir()}
    return [name for name in found.names if name in rooms] or ["__init__"]


def test_the_reader_of_imports_sees_how_they_are_made(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import t\nelse:\n    import e\n"
        "def f():\n    from c import d\nclass K:\n    import k\ntry:\n    import y\nexcept ImportError:\n    pass\n"
    )
    found = {i.module: (i.typing, i.top) for i in imports(path) if i.module != "typing"}
    assert found == {
        "a.b": (False, True), "t": (True, False), "e": (False, True), "c": (False, False), "k": (False, True),
        "y": (False, True),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------- core


@pytest.mark.parametrize("path", python_files(CORE), ids=lambda p: str(p.relative_to(CORE)))
def test_core_imports_no_plugin_and_no_command(path):
    forbidden = {m.package for m in MEMBERS if m.name != "rlhf-core"}
    assert [str(i) for i in imports(path) if i.package in forbidden] == []


def test_light_rooms_import_only_light_things():
    """When they are imported; a method may import what it works with."""
    bad = [
        str(i)
        for path in python_files(CORE)
        if room(path) in LIGHT
        for i in imports(path)
        if i.top
        and ((is_third_party(i) and i.package not in LIGHT_THIRD_PARTIES) or not set(rooms_imported(i)) <= LIGHT)
    ]
    assert bad == []


def test_ops_import_torch_and_the_contract_only():
    bad = [
        str(i)
        for path in python_files(CORE / "ops")
        for i in imports(path)
        if not i.typing
        and ((is_third_party(i) and i.package not in OPS_THIRD_PARTIES) or not set(rooms_imported(i)) <= OPS_ROOMS)
    ]
    assert bad == []


def test_only_the_controller_imports_the_controller():
    rooms = {"ops", "interfaces", "plugins", "data", "types", "errors", "config", "observe"}
    rooms |= {"runfile", "sections", "data_section"}
    bad = [
        str(i)
        for path in python_files(CORE)
        if room(path) in rooms
        for i in imports(path)
        if not i.typing and "controller" in rooms_imported(i)
    ]
    assert bad == []


def modules_imported(found: Import, modules: Collection[str]) -> set[str]:
    """Files that an import reaches: ``from a import b`` is one of ``a.b`` where that is a file, else of ``a``."""
    named = [f"{found.module}.{name}" for name in found.names]
    reached = {name if name in modules else found.module for name in named} or {found.module}
    return reached & {*modules}


def circles(arrows: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """Sets of modules that reach each other, however far around."""

    def reached_from(module: str) -> set[str]:
        reached, waiting = set[str](), [module]
        while waiting:
            new = {*arrows[waiting.pop()]} - reached
            reached |= new
            waiting += new
        return reached

    reached = {module: reached_from(module) for module in arrows}
    return sorted({tuple(sorted(b for b in reached[a] if a in reached[b])) for a in arrows} - {()})


def test_circles_are_found_however_far_around():
    arrows = {"a": "b", "b": "cd", "c": "a", "d": "e", "e": "d", "f": "a", "g": ""}
    assert circles(arrows) == [("a", "b", "c"), ("d", "e")]
    assert circles({"a": "bc", "b": "c", "c": ""}) == []


def test_no_files_of_core_import_each_other_in_a_circle():
    """Not for annotations either, nor inside of functions: a file stands on those that it imports. (Importing a file
    of a package is no import of the package's ``__init__`` here.)"""
    modules = {module_name(path): path for path in python_files(CORE)}
    arrows = {
        name: {other for i in imports(path) for other in modules_imported(i, modules)} - {name}
        for name, path in modules.items()
    }
    assert arrows["rlhf.interfaces.loss"] >= {"rlhf.types", "rlhf.ops.losses"}  # the second for annotations
    assert arrows["rlhf.plugins"] >= {"rlhf.plugins.pickling", "rlhf.plugins.registry"}
    assert circles(arrows) == []


def test_rooms_of_core_stand_on_each_other_in_one_order():
    """A room is a folder, or a file beside them. What an annotation names may lie above."""
    arrows: dict[str, set[str]] = {}
    for path in python_files(CORE):
        below = {name for i in imports(path) if not i.typing for name in rooms_imported(i)}
        arrows.setdefault(room(path), set()).update(below - {room(path)})
    assert arrows["controller"] >= {"data", "modeling", "ops"}
    assert circles(arrows) == []


def test_core_names_no_algorithm():
    """The controllers ask, never name. Comments and docstrings count: they would age first."""
    pattern = re.compile(r"(?<![A-Za-z])(" + "|".join(sorted(ALGORITHMS)) + r")(?![A-Za-z0-9])", re.IGNORECASE)
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in python_files(CORE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert bad == []


# ------------------------------------------------------------------------------------ plugins, cli


@pytest.mark.parametrize("member", PLUGINS, ids=name_of)
def test_plugins_import_the_contract_themselves_and_what_they_declare(member):
    provided = importlib_metadata.packages_distributions()
    declared = {
        canonicalize_name(r.name) for m in (member, BY_NAME["rlhf-core"]) for r in (*m.requirements, *m.optional)
    }
    bad = []
    for path in python_files(member.source):
        for i in imports(path):
            if i.package in {m.package for m in MEMBERS} - {"rlhf", member.package}:
                bad.append(f"{i}: a plugin may require another distribution, never import it")
            if {"controller", "testing"} & set(rooms_imported(i)):
                bad.append(f"{i}: not part of the contract")
            if i.package == "rlhf" and any(n.startswith("_") for n in (*i.module.split("."), *i.names)):
                bad.append(f"{i}: private")
            distributions = {canonicalize_name(d) for d in provided.get(i.package, [i.package])}
            if is_third_party(i) and not i.typing and not distributions & declared:
                bad.append(f"{i}: {member.name} does not require {' or '.join(sorted(distributions))}")
    assert bad == []


LIGHT_PLUGINS = [m for m in PLUGINS if {k for k, _, _ in m.entry_points} <= {"reward", "env", "rollout", "adapter"}]


@pytest.mark.parametrize("member", LIGHT_PLUGINS, ids=name_of)
def test_rewards_environments_and_rollouts_import_nothing_heavy_at_the_top(member):
    """They run in worker processes, which are started and killed: a second of torch each would be felt."""
    bad = [str(i) for p in python_files(member.source) for i in imports(p) if i.top and i.package in HEAVY - {"sympy"}]
    assert bad == []


@pytest.mark.parametrize("member", PLUGINS, ids=name_of)
def test_importing_any_plugin_package_is_cheap_enough_to_call_its_hooks(member):
    """A package's ``__init__`` holds hooks; what is heavy is imported by the hook or by the module it names."""
    bad = [str(i) for i in imports(member.source / "__init__.py") if i.top and i.package in HEAVY]
    assert bad == []


def test_cli_imports_core_only():
    allowed = {"rlhf", "rlhf_cli", "rich", "pydantic", "pydantic_core"}
    files = [p for p in python_files(CLI) if "templates" not in p.parts]
    bad = [str(i) for p in files for i in imports(p) if i.package not in allowed | set(sys.stdlib_module_names)]
    bad += [f"{i}: private" for p in files for i in imports(p) if i.package == "rlhf" and re.search(r"\._", i.module)]
    assert bad == []


# --------------------------------------------------------------------------------------- all files

ALL_FILES = [path for folder in WHERE for path in python_files(ROOT / folder)]


def test_no_file_is_longer_than_600_lines():
    long = {
        str(p.relative_to(ROOT)): n for p in ALL_FILES if (n := len(p.read_text(encoding="utf-8").splitlines())) > 600
    }
    assert long == {}


def test_no_file_is_a_drawer():
    drawers = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [str(p.relative_to(ROOT)) for p in ALL_FILES if p.name in drawers] == []


def test_every_module_says_what_it_is():
    sources = [p for m in MEMBERS for p in python_files(m.source) if "templates" not in p.parts]
    assert [str(p.relative_to(ROOT)) for p in sources if tree(p).body and not ast.get_docstring(tree(p))] == []
