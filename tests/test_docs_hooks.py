"""The pages in docs/hooks say what the code says."""

import importlib.util
import re
from pathlib import Path

import pytest
from rlhf.interfaces import KINDS

FOLDER = Path(__file__).parent.parent / "docs" / "hooks"
SPEC = importlib.util.spec_from_file_location("docs_hooks_reference", FOLDER / "reference.py")
reference = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reference)


def test_there_is_a_page_for_every_hook_and_for_nothing_else():
    assert {p.stem for p in FOLDER.glob("*.md")} == set(reference.PAGES)


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_is_what_the_code_says(name):
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert text == reference.page(name), "run: python docs/hooks/reference.py"


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_hook_every_member_and_a_way_to_start(kind):
    text = (FOLDER / f"{kind}.md").read_text(encoding="utf-8")
    assert f"def rlhf_register_{kind}() -> list[type[{KINDS[kind].__name__}]]: ..." in text
    members = [n for n in vars(KINDS[kind]) if not n.startswith("_") and n != "capabilities"]
    assert [n for n in members if not re.search(rf"^### `{n}\b", text, re.MULTILINE)] == []
    assert f"rlhf plugins new NAME --kind {kind}" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_written_part_is_there(kind):
    written = (FOLDER / f"{kind}.md").read_text(encoding="utf-8").partition(reference.MARKER)[0]
    assert written.startswith(f"# `rlhf_register_{kind}`\n")
    assert len(written.split()) > 40
