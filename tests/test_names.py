"""Variables and parameters are named by nouns of the field, never by participles, pronouns, adverbs or prepositions.
A class's name means one class."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.imports import python_files, tree
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

ROOMS = {member.folder.relative_to(ROOT).as_posix(): member for member in MEMBERS}


def vague_names(module: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable and parameter with such a name.

    Fields of classes are public names and are not listed; neither are parameters of a class's methods that have a
    field's name, such as those of ``__init__``.
    """
    public: set[ast.AST] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef):
            fields = [s.target for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            public |= {*fields}
            names = {field.id for field in fields}
            public |= {part for part in ast.walk(node) if isinstance(part, ast.arg) and part.arg in names}
    for node in ast.walk(module):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                pass
            case ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
                pass
            case _:
                continue
        if name in NAMES and node not in public:
            yield node.lineno, name


def hits(room: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files(ROOMS[room].source)
        for line, name in vague_names(tree(path))
    ]


def test_every_form_of_a_variable_is_read():
    source = """
class Case:
    found: int = 1
    def __init__(self, found, given): pass
def f(a, *, said, **told):
    made = one, kept = [a for seen in a]
    this.sent = (known := lambda held: held)
    for near, (asked, *taken) in a:
        with a as got: pass
    try: pass
    except ValueError as wanted: pass
    match a:
        case [drawn, *written]: pass
        case {"named": 1}: print(what)
"""
    names = {name for _, name in vague_names(ast.parse(source))}
    assert names == {
        *("given", "said", "told", "made", "one", "kept", "seen", "known", "held", "near", "asked", "taken", "got"),
        *("wanted", "drawn", "written"),
    }


@pytest.mark.parametrize("room", ROOMS)
def test_variables_and_parameters_are_nouns(room):
    lines = hits(room)
    assert not lines, "\n".join(["name each by a noun of the field that says what the value is:", *lines])


def test_no_two_classes_share_a_name():
    places: dict[str, list[str]] = defaultdict(list)
    for member in MEMBERS:
        for path in python_files(member.source):
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    shared = {name: lines for name, lines in places.items() if len(lines) > 1}
    lines = [f"{name}: {', '.join(shared[name])}" for name in sorted(shared.keys() - SHARED)]
    assert not lines, "\n".join(["name each by what it is, such as RankWorker and ToolWorker:", *lines])
    assert shared.keys() == SHARED, "a name of SHARED is the name of at most one class: take it out"
