"""The pages in docs/reference/hooks equal the code."""

import json
import re

import pytest
from rlhf import types
from rlhf.interfaces import KINDS
from rlhf.ops.losses import LossInput
from rlhf_algorithms.pair_learning import PairLearning
from rlhf_cli.main import main
from rlhf_runtime.config.data_section import DataSection, SourceSection
from rlhf_runtime.data.dataset import TrainData
from rlhf_testing.tiny import tiny_tokenizer
from transformers import AutoTokenizer

from tests.pages import DOCS, ROOT, script

FOLDER = DOCS / "reference/hooks"
reference = script(FOLDER.parent / "hooks.py")


def test_there_is_a_page_for_every_hook_and_for_nothing_else():
    assert {p.stem for p in FOLDER.glob("*.md")} == set(reference.PAGES)


def test_every_page_equals_the_code():
    for name in reference.PAGES:
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert text == reference.page(name), "run: python docs/reference/hooks.py"


def test_the_page_of_a_kind_has_the_hook_every_member_a_way_to_start_and_a_written_part():
    for kind in KINDS:
        text = (FOLDER / f"{kind}.md").read_text(encoding="utf-8")
        assert f"def rlhf_register_{kind}() -> list[type[{KINDS[kind].__name__}]]: ..." in text
        members = [n for n in vars(KINDS[kind]) if not n.startswith("_") and n != "capabilities"]
        assert [n for n in members if not re.search(rf"^### `{n}\b", text, re.MULTILINE)] == []
        assert f"rlhf plugins new NAME --kind {kind}" in text
        assert text.startswith(f"# `rlhf_register_{kind}`\n")
        assert len(text.partition(reference.MARKER)[0].split()) > 40


def test_the_page_of_types_has_every_type_of_the_interfaces():
    text = (FOLDER / "types.md").read_text(encoding="utf-8")
    classes = {f"rlhf.types.{n}": c for n, c in vars(types).items() if isinstance(c, type)}
    assert len(classes) > 15
    for place, cls in {**classes, "rlhf.ops.losses.LossInput": LossInput}.items():
        assert f"\n## `{place}`\n" in text
        for member in (
            *getattr(cls, "__dataclass_fields__", ()),
            *(n for n, v in vars(cls).items() if isinstance(v, property)),
        ):
            assert re.search(rf"^### `{member}\b", text, re.MULTILINE), f"{cls.__name__}.{member}"


@pytest.mark.parametrize(
    ("page", "kind"),
    [("component", "reward"), ("reward", "reward"), ("rollout", "rollout"), ("rollout", "advantage")],
)
def test_the_first_example_of_a_page_passes_its_suite(tmp_path, page, kind, capsys):
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8").partition(reference.MARKER)[0]
    (tmp_path / "example.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    assert main(["plugins", "check", f"file:{tmp_path / 'example.py'}", "--kind", kind]) == 0, capsys.readouterr()


@pytest.mark.parametrize("margin", ["by", None])
def test_a_real_batch_of_pairs_has_the_columns_that_its_table_lists(tmp_path, margin):
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_tokenizer(tmp_path / "tokenizer")))
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": str(n), "by": n} for n in (3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = SourceSection(path=str(tmp_path / "rows.jsonl"))
    data = TrainData(DataSection(train=(source,), shuffle=False, margin=margin), tokenizer, "pairs", 0)
    batch, _ = PairLearning().assemble(data.examples(data.take(2)))
    laid = {
        (name, level, str(values.dtype).removeprefix("torch."))
        for level, columns in (("token", batch.tok), ("sequence", batch.seq), ("unit", batch.unit))
        for name, values in columns.items()
    }
    page = (FOLDER / "building-algorithms.md").read_text(encoding="utf-8").partition("## `rlhf_algorithms.pairs`")[2]
    table_rows = re.findall(r"^``(\w+)`` +(\w+) +(\w+),", page.partition("\n### ")[0], re.MULTILINE)
    assert laid == {line for line in table_rows if margin or line[0] != "margin"}
    assert len(table_rows) == 2
    assert batch.role_B.tolist() == [0, 1, 0, 1]


def imported(source: str) -> set[tuple[str, str]]:
    """(module, name) of every `from rlhf... import name` in a source text."""
    lines = re.findall(r"^ *from (rlhf(?:_algorithms)?\.[\w.]+) import (?:\(([^)]*)\)|(.*))$", source, re.MULTILINE)
    return {(m, n.split("#")[0].strip()) for m, a, b in lines for n in (a or b).split(",") if n.strip()}


def test_the_page_of_building_blocks_has_every_name_that_authors_import():
    text = (FOLDER / "building-algorithms.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^##+ `([\w.]+)`$", text, re.MULTILINE))
    sources = [*ROOT.glob("plugins/algorithms/*/src/**/*.py"), *ROOT.glob("cli/**/*.template"), *DOCS.rglob("*.md")]
    used = set().union(*(imported(path.read_text(encoding="utf-8")) for path in sources))
    used = {f"{module}.{name}" for module, name in used if module in reference.BUILDING}
    assert len(used) > 15
    assert sorted(used - headings) == []
    assert set(reference.BUILDING) <= headings


def test_examples_in_the_pages_are_complete():
    """No class may be outside of a code block, which would mean that the block ends too early."""
    for path in FOLDER.glob("*.md"):
        prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"^(class|    def|async def) ", prose, re.MULTILINE), path.name
