"""Allowed imports between distributions and folders, read from the sources; rules about files."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache

import pytest
from packaging.utils import canonicalize_name
from rlhf_testing.conformance import SUITES

from tests.imports import Import, imports, module_name, python_files, tree
from tests.members import BY_NAME, MEMBERS, PLUGINS, ROOT, Member

CORE = BY_NAME["rlhf-core"].source
HEAVY = {"torch", "transformers", "datasets", "numpy", "pandas", "peft", "sympy"}
LIBRARIES = {m.package for m in MEMBERS if m.folder.parent.name == "libraries"}
ARROWS: Mapping[str, Collection[str]] = {
    "rlhf": (),
    "rlhf_hub": ["rlhf"],
    "rlhf_modeling": ["rlhf", "rlhf_hub"],
    "rlhf_workers": ["rlhf"],
    "rlhf_engines": ["rlhf", "rlhf_modeling"],
    "rlhf_algorithms": ["rlhf"],
    "rlhf_endpoint": ["rlhf"],
    "rlhf_runtime": ["rlhf", "rlhf_hub"],
    "rlhf_testing": ["rlhf", *LIBRARIES, "rlhf_runtime"],
    "rlhf_cli": ["rlhf", "rlhf_hub", "rlhf_modeling", "rlhf_runtime", "rlhf_testing"],
}
"""Allowed imports of each distribution that is not a plugin. Plugins: the core and libraries."""
LIGHT_THIRD_PARTIES = {"pydantic", "pydantic_core", "pluggy", "packaging"}
TENSOR_ROOMS = {"ops", "weights"}
"""Folders of the core that import torch."""

ALGORITHMS = {
    *("ppo", "grpo", "rloo", "reinforce", "sft", "dpo", "kto", "gspo", "cispo", "dapo", "remax", "orpo", "simpo"),
    *("ipo", "prm"),
    *(name for m in PLUGINS for kind, name, _ in m.entry_points if kind == "algorithm"),
} - {"reward_model"}
"""All names, except ``reward_model``, which is also the name of a role."""

BACKENDS = {"deepspeed", "vllm", "sglang", "ray", "openrlhf", "trl", "verl"}

FOLDERS = ("core", "libraries", "runtime", "testing", "cli", "plugins", "tests", "benchmarks", "examples", "docs")


def test_the_parser_of_imports_finds_every_form(tmp_path):
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import t\nelse:\n    import e\n"
        "def f():\n    from c import d\nclass K:\n    import k\ntry:\n    import y\nexcept ImportError:\n    pass\n"
    )
    forms = {i.module: (i.typing, i.top) for i in imports(path) if i.module != "typing"}
    assert forms == {
        "a.b": (False, True), "t": (True, False), "e": (False, True), "c": (False, False), "k": (False, True),
        "y": (False, True),
    }  # fmt: skip


# ----------------------------------------------------------------------------------- distributions


def allowed(member: Member) -> set[str]:
    return {member.package, *ARROWS.get(member.package, {"rlhf", *LIBRARIES})}


provided_by = cache(importlib.metadata.packages_distributions)
"""{package: the installed distributions that provide it}."""


def test_a_distribution_imports_what_it_may_and_declares():
    assert [problem for member in MEMBERS for problem in problems(member)] == []


def problems(member: Member) -> Iterator[str]:
    """Imports of a distribution that it may not have, or that it does not require."""
    packages = {m.package: m.name for m in MEMBERS}
    provided = provided_by()
    declared = {canonicalize_name(r.name) for r in (*member.requirements, *member.optional)}
    for needed in member.ours:
        declared |= {canonicalize_name(r.name) for r in (*needed.requirements, *needed.optional)}
    for path in python_files(member.source):
        for i in imports(path):
            if i.package in packages:
                if i.package not in allowed(member):
                    yield f"{i}: {member.package} may import {sorted(allowed(member))} only"
                elif i.package != member.package and packages[i.package] not in declared:
                    yield f"{i}: {member.name} does not require {packages[i.package]}"
                if i.package != member.package and any(re.match("_(?!_)", n) for n in (*i.module.split("."), *i.names)):
                    yield f"{i}: private"
            elif i.package not in sys.stdlib_module_names and not i.typing:
                distributions = {canonicalize_name(d) for d in provided.get(i.package, [i.package])}
                if not distributions & declared:
                    yield f"{i}: {member.name} does not require {' or '.join(sorted(distributions))}"


def modules_imported(statement: Import, modules: Collection[str]) -> set[str]:
    """Files that an import reaches: ``from a import b`` is one of ``a.b`` where that is a file, else of ``a``."""
    names = [f"{statement.module}.{name}" for name in statement.names]
    reached = {name if name in modules else statement.module for name in names} or {statement.module}
    return reached & {*modules}


def circles(arrows: Mapping[str, Collection[str]]) -> list[tuple[str, ...]]:
    """Sets of modules that import each other, directly or indirectly."""

    def reached_from(module: str) -> set[str]:
        reached, waiting = set[str](), [module]
        while waiting:
            new = {*arrows[waiting.pop()]} - reached
            reached |= new
            waiting += new
        return reached

    reached = {module: reached_from(module) for module in arrows}
    return sorted({tuple(sorted(b for b in reached[a] if a in reached[b])) for a in arrows} - {()})


def test_import_cycles_of_any_length_are_found():
    arrows = {"a": "b", "b": "cd", "c": "a", "d": "e", "e": "d", "f": "a", "g": ""}
    assert circles(arrows) == [("a", "b", "c"), ("d", "e")]
    assert circles({"a": "bc", "b": "c", "c": ""}) == []


def test_no_files_of_a_distribution_import_each_other_in_a_circle():
    """Imports for annotations and inside functions count too. An import of a file of a package does not count as an
    import of the package's ``__init__``."""
    for member in MEMBERS:
        modules = {module_name(path, member.source): path for path in python_files(member.source)}
        arrows = {
            name: {other for i in imports(path) for other in modules_imported(i, modules)} - {name}
            for name, path in modules.items()
        }
        assert circles(arrows) == []


def test_folders_of_the_runtime_import_each_other_in_one_order():
    """A room is a folder, or a file next to the folders. Imports for annotations only do not count."""
    source = BY_NAME["rlhf-runtime"].source
    arrows: dict[str, set[str]] = {}
    for path in python_files(source):
        room = path.relative_to(source).parts[0].removesuffix(".py")
        folders = {
            i.module.split(".")[1] for i in imports(path) if not i.typing and i.module.startswith("rlhf_runtime.")
        }
        arrows.setdefault(room, set()).update(folders - {room})
    assert circles(arrows) == []


def test_the_public_suites_hold_nothing_that_only_tests_of_this_repository_use():
    """``rlhf plugins check`` and ``new``, pages, examples and sources of plugins reach every module of rlhf_testing."""
    source = BY_NAME["rlhf-testing"].source
    modules = {module_name(path, source): path for path in python_files(source)}
    folders = [ROOT / "examples", *(m.source for m in MEMBERS if m.source != source)]
    files = [path for folder in folders for form in ("*.md", "*.py", "*.template") for path in folder.rglob(form)]
    files += (ROOT / "docs").rglob("*.md")
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    waiting = ["rlhf_testing", *re.findall(r"rlhf_testing\.\w+", text), *(module for module, _ in SUITES.values())]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in modules and name not in reached:
            reached.add(name)
            waiting += [other for i in imports(modules[name]) for other in modules_imported(i, modules)]
    assert {*modules} - reached == set(), "move them to tests/support"


# -------------------------------------------------------------------------------------------- core


def test_the_contract_imports_nothing_heavy():
    """Only imports at module level count; a method may import heavy modules."""
    bad = [
        str(i)
        for path in python_files(CORE)
        if path.relative_to(CORE).parts[0] not in TENSOR_ROOMS
        for i in imports(path)
        if (i.top and i.package not in {*sys.stdlib_module_names, *LIGHT_THIRD_PARTIES, "rlhf"})
        or (i.top and i.module.split(".")[:2] in [["rlhf", room] for room in TENSOR_ROOMS])
    ]
    assert bad == []


@pytest.mark.parametrize(
    ("names", "members"),
    [(ALGORITHMS, ["rlhf-core", "rlhf-runtime"]), (BACKENDS, ["rlhf-core"])],
    ids=["algorithm", "backend"],
)
def test_the_core_names_no_algorithm_and_no_backend(names, members):
    """Comments and docstrings count too, because they would become outdated."""
    pattern = re.compile(r"(?<![A-Za-z])(" + "|".join(sorted(names)) + r")(?![A-Za-z0-9])", re.IGNORECASE)
    bad = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for member in members
        for path in python_files(BY_NAME[member].source)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert bad == []


# ----------------------------------------------------------------------------------------- plugins


def test_rewards_environments_and_rollouts_import_nothing_heavy_at_the_top():
    """They run in worker processes, which are started and killed often; an import of torch takes a second each time."""
    light = [m for m in PLUGINS if {k for k, _, _ in m.entry_points} <= {"reward", "env", "rollout", "adapter"}]
    files = [path for member in light for path in python_files(member.source)]
    assert [str(i) for path in files for i in imports(path) if i.top and i.package in HEAVY - {"sympy"}] == []


def test_importing_any_plugin_package_is_cheap_enough_to_call_its_hooks():
    """A package's ``__init__`` has the hooks. Heavy modules are imported inside a hook."""
    files = [member.source / "__init__.py" for member in PLUGINS]
    assert [str(i) for path in files for i in imports(path) if i.top and i.package in HEAVY] == []


# --------------------------------------------------------------------------------------- all files

ALL_FILES = [path for folder in FOLDERS for path in python_files(ROOT / folder)]


def test_no_file_is_longer_than_500_lines_or_600_of_tests():
    lines = {p.relative_to(ROOT): len(p.read_text(encoding="utf-8").splitlines()) for p in ALL_FILES}
    assert [str(p) for p, number in lines.items() if number > (600 if "tests" in p.parts else 500)] == []


def test_no_file_is_called_utils_or_helpers():
    drawers = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [str(p.relative_to(ROOT)) for p in ALL_FILES if p.name in drawers] == []


def test_every_module_has_a_docstring():
    sources = [p for m in MEMBERS for p in python_files(m.source) if "templates" not in p.parts]
    assert [str(p.relative_to(ROOT)) for p in sources if tree(p).body and not ast.get_docstring(tree(p))] == []
