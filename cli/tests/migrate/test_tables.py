"""The tables of options: each option of a framework has a row, and each row says what becomes of it."""

from pathlib import Path

import pytest
from rlhf_cli.migrate import openrlhf, trl
from rlhf_cli.migrate.find import FRAMEWORKS
from rlhf_cli.migrate.rows import FrameworkOptions, matching, rows_of, table


def options(name):
    """(entry point, names of its options) of each line."""
    lines = Path(__file__).with_name(name).read_text().splitlines()
    return [line.split(": ") for line in lines if not line.startswith("#")]


OPTIONS = [
    *(
        ("openrlhf", openrlhf.GROUPS[openrlhf.ENTRIES[entry]], names)
        for entry, names in options("openrlhf_options.txt")
    ),
    *(("trl", trl.GROUPS[entry], names) for entry, names in options("trl_fields.txt")),
]


@pytest.mark.parametrize(("framework", "groups", "names"), OPTIONS)
def test_every_option_has_a_row(framework, groups, names):
    rows = rows_of(table(framework), groups)
    assert all(matching(rows, name, framework, table(framework)) for name in names.split())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_row_says_what_becomes_of_its_option(framework):
    groups = table(framework)
    conditions = FRAMEWORKS[framework].conditions(FrameworkOptions(framework, groups, rows_of(groups, groups), ""))
    for row in (row for rows in groups.values() for row in rows):
        assert bool(row.to) != bool(row.why), row.name
        assert not row.when or row.when in conditions, row.name
