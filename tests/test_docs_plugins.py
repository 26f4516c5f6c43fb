"""docs/how-to/plugins.md: its example works, its table is the grammar, its links lead somewhere."""

import re

from rlhf.plugins import Plugins, parse_reference
from rlhf.plugins.entry import KINDS
from rlhf_cli.scaffold import write_plugin

from tests.pages import DOCS, blocks, links, read

PAGE = DOCS / "how-to/plugins.md"


def test_the_file_example_works(tmp_path):
    (tmp_path / "brevity.py").write_text(blocks(PAGE, "python")[0].text)
    assert Plugins.discover().resolve("reward", f"file:{tmp_path / 'brevity.py'}").name == "brevity"


def test_the_shown_parts_of_a_new_plugin_equal_what_the_command_writes(tmp_path):
    folder = write_plugin("brevity", "reward", tmp_path)
    for excerpt, file in (
        (blocks(PAGE, "toml")[0].text, "pyproject.toml"),
        (blocks(PAGE, "python")[1].text, "src/rlhf_plugin_brevity/__init__.py"),
    ):
        file_lines = (folder / file).read_text(encoding="utf-8").splitlines()
        lines = [line.split("  #")[0].rstrip() for line in excerpt.splitlines() if not line.startswith("# ")]
        assert len(lines) > 5
        assert [line for line in lines if line not in file_lines] == []


def test_every_reference_in_the_table_parses():
    table = read(PAGE).split("| reference | selects |\n")[1].split("\n\n")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    references = [ref for row in rows for ref in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(references) == 8
    for reference in references:
        assert parse_reference("reward", reference.replace("...", "host")).text


def test_every_kind_is_linked():
    assert {f"../reference/hooks/{kind}.md" for kind in KINDS} <= set(links(PAGE))
