"""The documentation as data: pages, their code blocks, their links, and the commands they show."""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def pages() -> list[Path]:
    """Every page of the documentation, written by hand or generated."""
    outer = ROOT.glob("*.md")
    members = [path for folder in ("[!.]*", "libraries/*", "plugins/*/*") for path in ROOT.glob(f"{folder}/README.md")]
    readmes = [*ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/**/*.md")]
    return sorted({*outer, *DOCS.rglob("*.md"), *members, *readmes})


def script(path: Path) -> ModuleType:
    """A Python file that no package holds, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True)
class Block:
    """A fenced code block; ``file``: the file that an executed page writes it to."""

    page: Path
    language: str
    file: str
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}: {self.text.splitlines()[0] if self.text else ''}"


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[Block]:
    """The page's code blocks of these languages, in order; all blocks if no language is given."""
    code = [
        Block(page, m[1], (re.search(r"file=(\S+)", m[2]) or ["", ""])[1], m[3]) for m in FENCE.finditer(read(page))
    ]
    return [b for b in code if not languages or b.language in languages]


@dataclass(frozen=True)
class Table:
    """A table: the heading above it, the names of its columns, and its rows by column name."""

    heading: str
    header: tuple[str, ...]
    rows: tuple[dict[str, str], ...]


def tables(page: Path) -> list[Table]:
    heading, contents, lines = "", [], []
    for line in [*prose(page).splitlines(), ""]:
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            lines.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif lines:
            header, _, *rows = lines
            contents.append(Table(heading, tuple(header), tuple(dict(zip(header, r, strict=True)) for r in rows)))
            lines = []
    return contents


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return FENCE.sub("", read(page))


def links(page: Path) -> list[str]:
    """Targets of the page's links within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return [link for link in targets if not re.match(r"\w+:", link)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page, made from its headings like on GitHub."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def commands(page: Path) -> list[list[str]]:
    """Every ``rlhf ...`` command line of the page, as words: in shell blocks, indented blocks and inline code."""
    shell = "\n".join(b.text for b in blocks(page, "sh", "bash", "")).replace("\\\n", " ")
    lines = [line.strip() for line in shell.splitlines()]
    lines += [line.strip() for line in prose(page).splitlines() if line.startswith("    ")]
    lines += re.findall(r"`(rlhf [^`\n]+)`", prose(page))
    argument_lists = []
    for line in lines:
        for part in re.split(r"\s*(?:&&|\|\||;)\s*", line):
            if part.startswith("rlhf "):
                argument_lists.append(shlex.split(part.partition(" #")[0])[1:])
    return argument_lists
