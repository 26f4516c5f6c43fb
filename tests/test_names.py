"""Variables, parameters, functions, fields and attributes are named by nouns of the field or by verbs, never by
participles, pronouns, adverbs or prepositions. Outside `src` this holds for variables of functions. A class's name
means one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.imports import python_files
from tests.members import MEMBERS, ROOT

_WORDS = """
about above again ahead alike alone among apart asked at away back before behind below beside beyond both built
called changed counted drawn each elsewhere ended enough everything found further given got held here how inside
instead its kept known later least lent less listed loaded made mine more most named near nothing now of off once
one only others otherwise ours outside own past placed read said same seen sent several shown since some stated
such taken theirs then there this to together told tried twice until usual wanted what when where which while who
whole why within without written yes
"""
NAMES = {name for word in _WORDS.split() for name in (word, word.upper())}
"""Names that say nothing about a value. ``defaults``, ``columns``, ``matches``, ``message`` do."""

SHARED = {"Config"}
"""Names that classes of a pattern share. ``Config``: the options of a component that stands beside them."""

KEPT = {
    "Batch.to": "as torch.Tensor.to",
    "OutputHead.to": "as torch.Tensor.to",
    "CallForm.read": "a function, so a verb",
    "OptionRow.to": "a key of the tables of `rlhf migrate`",
    "OptionRow.when": "a key of the tables of `rlhf migrate`",
    "OptionRow.why": "a key of the tables of `rlhf migrate`",
}
"""{member of a class: why it keeps its name}."""
FILES = {"ComponentConfig", "Saved"}
"""Classes whose fields are keys of files, which keep their names: run files that users write, and checkpoints."""

OTHERS = ("benchmarks", "cli", "core", "docs", "examples", "libraries", "plugins", "runtime", "testing", "tests")
"""Folders whose tests, benchmarks and examples are held to the rule in the variables of their functions."""


def vague_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable, parameter, function and attribute with such a name, without leading underscores. A
    field or method is ``Class.name``.

    Allowed are functions called ``read``, which is a verb too, and constructors called ``of``, such as
    ``Failure.of(error)``. Parameters with the name of their class's field are not listed: the field is.
    """
    owners: dict[ast.AST, str] = {}
    allowed: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            targets = [s.target for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            owners |= dict.fromkeys([*targets, *node.body], node.name)
            names = {target.id for target in targets}
            allowed |= {part for part in ast.walk(node) if isinstance(part, ast.arg) and part.arg in names}
            if FILES & {ast.unparse(base) for base in node.bases}:
                allowed |= {*targets}
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if node.name == "of" and decorators & {"classmethod", "staticmethod"}:
                allowed.add(node)
    for node in ast.walk(module):
        match node:
            case ast.Name(id=str(name), ctx=ast.Store()) | ast.Attribute(attr=str(name), ctx=ast.Store()):
                pass
            case ast.arg(arg=str(name)) | ast.ExceptHandler(name=str(name)):
                pass
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.lstrip("_") != "read":
                pass
            case _:
                continue
        name = name.lstrip("_")
        if name in NAMES and node not in allowed:
            yield node.lineno, f"{owners[node]}.{name}" if node in owners else name


def test_every_form_of_a_name_is_read():
    source = """
class Case:
    found: int = 1
    _whole: int = 1
    def __init__(self, found, given): pass
    @classmethod
    def of(cls): pass
    def read(self): pass
    def before(self): pass
class Options(ComponentConfig):
    where: str = ""
    def of(self): pass
def f(a, *, said, **told):
    made = one, kept = [a for seen in a]
    this.sent = (known := lambda held: held)
    for near, (asked, *taken) in a:
        with a as got: pass
    try: pass
    except ValueError as wanted: pass
    match a:
        case [drawn, *written]: pass
        case {"named": 1}: print(what.when)
async def ended(): pass
def _within(): _NOTHING = 1
"""
    names = {name for _, name in vague_names(ast.parse(source))}
    assert names == {
        *("given", "said", "told", "made", "one", "kept", "seen", "known", "held", "near", "asked", "taken", "got"),
        *("wanted", "drawn", "written", "sent", "ended", "within", "NOTHING"),
        *("Case.found", "Case.whole", "Case.before", "Options.of"),
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, tuple[list[tuple[int, str]], list[tuple[int, str]]]]:
    """{file of a distribution: its vague names, and its classes, each with their lines}. No tree is kept: so many
    objects make the garbage collector slow."""
    names = {}
    for path in (path for member in MEMBERS for path in python_files(member.source)):
        module = ast.parse(path.read_text(encoding="utf-8"))
        classes = [(node.lineno, node.name) for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        names[str(path.relative_to(ROOT))] = [*vague_names(module)], classes
    return names


def test_names_are_nouns_or_verbs(sources):
    places = [(f"{path}:{line}", name) for path, (names, _) in sources.items() for line, name in names]
    lines = [f"{place}: {name}" for place, name in places if name not in KEPT]
    assert not lines, "\n".join(["name each by a noun of the field that says what the value is, or by a verb:", *lines])
    assert {name for _, name in places} == KEPT.keys(), "a name of KEPT is no vague name of a class: take it out"


def local_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable with such a name that is neither a name of the module nor a field of a class."""
    fields = {
        node
        for body in (module, *(node for node in ast.walk(module) if isinstance(node, ast.ClassDef)))
        for statement in body.body
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For)
        for node in ast.walk(statement)
    }
    for node in ast.walk(module):
        match node:
            case ast.Name(id=str(name), ctx=ast.Store()) if name.lstrip("_") in NAMES and node not in fields:
                yield node.lineno, name


def test_variables_of_tests_benchmarks_and_examples_are_nouns():
    files = [path.relative_to(ROOT) for folder in OTHERS for path in python_files(ROOT / folder)]
    lines = [
        f"{path}:{line}: {name}"
        for path in files
        if "src" not in path.parts
        for line, name in local_names(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    ]
    assert not lines, "\n".join(["name each by a noun of the field that says what the value is:", *lines])


def test_no_two_classes_share_a_name(sources):
    places: dict[str, list[str]] = defaultdict(list)
    for path, (_, classes) in sources.items():
        for line, name in classes:
            places[name].append(f"{path}:{line}")
    shared = {name: lines for name, lines in places.items() if len(lines) > 1}
    lines = [f"{name}: {', '.join(shared[name])}" for name in sorted(shared.keys() - SHARED)]
    assert not lines, "\n".join(["name each by what it is, such as RankWorker and ToolWorker:", *lines])
    assert shared.keys() == SHARED, "a name of SHARED is the name of at most one class: take it out"
