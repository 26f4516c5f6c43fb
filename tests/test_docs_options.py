"""Tables of options in the plugins' pages: every option is listed and exists, and has the stated default."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from rlhf.interfaces import KINDS
from rlhf.plugins import Plugins
from rlhf_cli.describe import options

from tests.pages import ROOT, Table, name_of, prose, read, tables

PAGES = sorted([*ROOT.glob("plugins/*/*/README.md"), *ROOT.glob("libraries/*/README.md")])
MADE_FROM_FILES = "plugins/adapters/openrlhf/README.md"
"""Its options belong to the plugins that it makes from files; its own tests check them."""


@dataclass(frozen=True)
class Stated:
    """One option in a table: the plugins that may have it, and its default as written on the page."""

    name: str
    default: str
    plugins: tuple[tuple[str, str], ...]
    """(kind, name) of those in the distribution that the row can mean, in the order of the page."""


@cache
def configs(distribution: str) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> option -> its default (``...`` where required) of all plugins of a distribution."""
    plugins, defaults = Plugins.discover(), {}
    for kind in KINDS:
        for entry in plugins.list(kind):
            if entry.distribution == distribution:
                cls = plugins.resolve(kind, f"{distribution}/{entry.name}").cls
                rows = options(cls.Config) if hasattr(cls, "Config") else []
                defaults[kind, entry.name] = {o["name"]: ... if o["required"] else o["default"] for o in rows}
    return defaults


def distribution(page) -> str:
    return read(page).splitlines()[0].removeprefix("# ")


def stated(page) -> list[Stated]:
    """All options of all tables with a column ``option``. A cell left empty under ``plugin`` and ``kind`` repeats the
    one above it; where a table has neither, the heading above it may name the kind (``## Trainer `torch```)."""
    statements = []
    for table in tables(page):
        if "option" not in table.header:
            continue
        kind, names = in_heading(table, page)
        for row in table.rows:
            if row.get("kind"):
                kind, names = row["kind"].partition(",")[0], ticked(row["plugin"])
            elif row.get("of"):
                names = of(row["of"], {name for _, name in configs(distribution(page))})
            statements += in_row(row, kind, names, page)
    return statements


def of(cell: str, plugins: set[str]) -> list[str]:
    """Names under ``of``: ``gae, reinforce``; ``all but value``; none where it says ``all``."""
    members = [name for name in re.findall(r"\w+", cell) if name in plugins]
    return sorted(plugins - set(members)) if " but " in cell else members


def in_heading(table: Table, page) -> tuple[str, list[str]]:
    words = re.findall(r"[a-z]+", table.heading.lower())
    kinds = [
        k for k in {k for k, _ in configs(distribution(page))} if k in words or f"{k}s" in words or f"{k}es" in words
    ]
    return (kinds[0] if len(kinds) == 1 else ""), []


def in_row(row: dict[str, str], kind: str, names: list[str], page) -> list[Stated]:
    plugin_defaults = configs(distribution(page))
    plugins = [key for key in plugin_defaults if (not kind or key[0] == kind) and (not names or key[1] in names)]
    plugins.sort(key=lambda key: names.index(key[1]) if names else 0)
    fields, statements = [], []
    for name in ticked(row["option"]):
        fields.append(f"{fields[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name)
    if " / " in row.get("of", ""):  # one default for each of the plugins named
        for key, default in zip(plugins, row["default"].split(" / "), strict=True):
            statements += [
                Stated(f, d, (key,)) for f, d in zip(fields, split_defaults(default, len(fields)), strict=True)
            ]
        return statements
    having = [[key for key in plugins if field in plugin_defaults[key]] for field in fields]
    defaults = split_defaults(row["default"], len(fields))
    return [Stated(f, d, tuple(keys)) for f, d, keys in zip(fields, defaults, having, strict=True)]


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def split_defaults(cell: str, count: int) -> list[str]:
    """``1, 1`` of two options; one default that several share is that of each."""
    parts = cell.split(", ") if count > 1 else [cell]
    return parts if len(parts) == count else [cell] * count


WORDS = {"all five": ["boxed", "hash", "tag", "answer_is", "last_number"]}
"""Defaults that a page states in words."""


def meant(text: str, plugin: str) -> tuple[Any, ...]:
    """The defaults that a cell can mean. Words describe the behaviour if the option is absent."""
    default_text, *exceptions = text.split("; ")
    for other in exceptions:  # token_mean; gspo, sapo: seq_mean_token_mean
        names, colon, default = other.partition(": ")
        if colon and plugin in names.replace("`", "").split(", "):
            return meant(default, plugin)
    text = default_text.replace("`", "").strip()
    if text == "":
        return None, ..., [], {}
    if text == "required":
        return (...,)
    if text == "none":
        return None, "none"
    if text in ("off", "absent", "-") or text.startswith("absent ("):
        return (None,)
    if text in WORDS:
        return (WORDS[text],)
    try:
        return (json.loads(re.sub(r"(?<=\d) (?=\d{3})", "", text)),)
    except ValueError:
        return (None if " " in text else text,)


def wrong(page) -> list[str]:
    defaults = configs(distribution(page))
    problems = []
    for option in stated(page):
        if not option.plugins:
            problems.append(f"{option.name} is not an option of any of {list(defaults)}")
        for key in option.plugins:
            default = defaults[key].get(option.name, "no such option")
            if not any(
                (type(default) is type(m) and default == m) or same_number(default, m)
                for m in meant(option.default, key[1])
            ):
                problems.append(f"{key[0]} {key[1]}: {option.name} is stated as {option.default!r}, but is {default!r}")
    return problems


def same_number(a: Any, b: Any) -> bool:
    return all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b)) and a == b


def missing(page) -> list[str]:
    """Options that the page does not name: neither in a table, nor in code within a row or sentence, nor as those of
    another plugin (``all options of the trainer `torch```)."""
    defaults, page_options = configs(distribution(page)), {(key, o.name) for o in stated(page) for key in o.plugins}
    words = set(re.findall(r"[\w.]+", " ".join(ticked(prose(page)))))
    borrowed = {}
    for kind, name in re.findall(r"all options of the (\w+) `(\w+)`", prose(page)):
        borrowed |= dict(options_of(kind, name))
    return [
        f"{kind} {name}: {option}"
        for (kind, name), fields in defaults.items()
        for option, default in fields.items()
        if ((kind, name), option) not in page_options
        and option.rpartition(".")[2] not in words
        and borrowed.get(option, "absent") != default
    ]


def options_of(kind: str, name: str) -> dict[str, Any]:
    resolved = Plugins.discover().resolve(kind, name)
    return configs(resolved.distribution)[kind, name]


def test_options_and_defaults_in_the_tables_are_those_of_the_code():
    for page in PAGES:
        if name_of(page) != MADE_FROM_FILES:
            assert wrong(page) == [], page


def test_every_option_is_on_its_plugins_page():
    for page in PAGES:
        assert missing(page) == [], page


def test_no_option_and_no_paragraph_is_repeated():
    for page in PAGES:
        rows = [(o.name, o.plugins) for o in stated(page)]
        assert sorted({str(row) for row in rows if rows.count(row) > 1}) == [], page
        paragraphs = [p[:60] for p in prose(page).split("\n\n") if len(p) > 120]
        assert [p for p in paragraphs if paragraphs.count(p) > 1] == [], page


def test_a_mistake_in_a_table_is_detected(tmp_path):
    page = tmp_path / "README.md"
    head = "# rlhf-plugin-length\n\n| option | default | |\n|---|---|---|\n"
    page.write_text(head + "| `low`, `high` | | |\n| `per_token` | 0.1 | |\n| `at_mots`, `inside` | 1.0, 0.0 | |\n")
    assert [p.partition(" ")[0] for p in wrong(page)] == ["reward", "at_mots"]
    assert "per_token is stated as '0.1', but is 0.01" in wrong(page)[0]
    assert missing(page) == ["reward length: at_most"]
