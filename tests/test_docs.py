"""Checks of the documentation: code runs, generated pages equal the code, commands, flags, files and links exist."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from functools import cache
from pathlib import Path

import pytest
from rlhf.plugins import Plugins
from rlhf_cli import completion
from rlhf_cli.describe import options
from rlhf_cli.main import split_dotted
from rlhf_runtime.config.flag_values import item_of, model_of
from rlhf_runtime.config.runfile import LISTS, SINGLE, RunFile
from rlhf_testing import conformance

from tests.forks import Forks, Place
from tests.pages import DOCS, ROOT, anchors, blocks, commands, links, name_of, pages, prose, read, script, tables

PLUGINS = Plugins.discover()
whole_parser = cache(completion.whole_parser)

# ----------------------------------------------------------------------------------------- executed

PIP = """#!{bash}
# An offline stand-in for pip: installs into a folder of the test and links the sources, like -e.
set -e
[ "$1 $2" = "install -e" ] || {{ echo "only 'pip install -e FOLDER' is known here, got: $*"; exit 1; }}
{python} -m pip install -q --no-index --no-deps --no-build-isolation --upgrade --target "{target}" "./$3"
for package in "$PWD/$3"/src/*/; do
  name=$(basename "$package"); rm -rf "{target}/$name"; ln -s "$PWD/$3/src/$name" "{target}/$name"
done
"""


class Shell:
    """Runs shell blocks in its own folder. ``pip install -e`` needs no network and changes no environment.

    A line is one command with plain words. Python programs run in children of a process that has imported torch.
    """

    def __init__(self, base: Path, forks: Forks) -> None:
        tools, target, self.folder = base / "tools", base / "installed", base / "work"
        for folder in (tools, target, self.folder):
            folder.mkdir()
        pip = tools / "pip"
        pip.write_text(PIP.format(bash="/usr/bin/env bash", python=sys.executable, target=target))
        pip.chmod(0o755)
        self.forks = forks
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTEST_ADDOPTS": "--import-mode=importlib -p no:cacheprovider",
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, text: str) -> str:
        """Run the lines and return their output. Every line must succeed."""
        transcript = ""
        for line in text.splitlines():
            code, output = self.line(line)
            assert code == 0, f"{line}\n{transcript}{output[-6000:]}"
            transcript += output
        return transcript

    def line(self, line: str) -> tuple[int, str]:
        """(exit code, output)."""
        program, *words = shlex.split(line, comments=True)
        if program == "pip":
            command, arguments = ["bash", "-c", line], {"cwd": self.folder, "env": self.environment}
            done = subprocess.run(command, **arguments, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr
        assert program in ("rlhf", "python", "pytest"), f"not known here: {line}"
        assert not set(line) & set("|&;<>()$`*?~"), f"not one plain command: {line}"
        process = self.forks.start(words, place=Place(program, str(self.folder), self.environment))
        return process.wait(), process.output


@pytest.fixture
def shell(tmp_path: Path, forks: Forks) -> Shell:
    return Shell(tmp_path, forks)


def execute(page: Path, shell: Shell) -> str:
    """Write the files, run the shell blocks, and check that each line of a ``text`` block is in the output of the last
    command. Returns that output."""
    output = ""
    for block in blocks(page):
        if block.file:
            path = shell.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "sh":
            output = shell(block.text)
        elif block.language == "text":
            missing = [line for line in block.text.splitlines() if line not in output]
            assert not missing, f"{missing} is not in the output:\n{output}"
    return output


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("page", ["first-run", "first-reward", "from-python"])
def test_the_tutorial_works_from_the_first_line_to_the_last(shell, page):
    execute(DOCS / f"tutorial/{page}.md", shell)


@pytest.mark.full
@pytest.mark.slow
def test_the_tutorials_algorithm_works_and_its_wrong_options_are_refused(shell):
    execute(DOCS / "tutorial/first-algorithm.md", shell)
    code, output = shell.line("rlhf train run.toml --algorithm.advantage.q 0.5 --output runs/other")
    assert code == 2
    assert "algorithm.advantage.q (flag --algorithm.advantage.q): unknown key" in output
    assert not (shell.folder / "runs" / "other").exists(), "found before anything starts"


@pytest.mark.full
@pytest.mark.slow
def test_the_inputs_from_the_author_work_as_the_conformance_page_says(shell):
    output = execute(DOCS / "reference/conformance.md", shell)
    assert output.count("0 failed, 0 left out.") == 4, output


def test_the_attributes_of_the_conformance_page_are_those_of_the_suites():
    [table] = [t for t in tables(DOCS / "reference/conformance.md") if t.header == ("suite", "attributes")]
    for row in table.rows:
        kind = row["suite"] if row["suite"] in conformance.SUITES else "reward"
        names = re.findall(r"(?:^|, )`([a-z_]+)", row["attributes"])
        assert names
        assert [n for n in names if not hasattr(conformance.suite(kind), n)] == [], row
    assert {row["suite"] for row in table.rows} - set(conformance.SUITES) == {"every kind"}


def test_the_file_of_a_block_is_named_above_it():
    """A reader does not see the text after the fence."""
    for page in pages():
        for block in blocks(page):
            if block.file:
                opening = f"```{block.language} file={block.file}\n"
                assert f"`{block.file}`:\n\n{opening}" in read(page), f"{name_of(page)}: {block.file}"


@pytest.mark.full
@pytest.mark.slow
def test_a_block_that_fails_or_prints_something_else_is_noticed(shell, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python file=a/b.py\nprint(1)\n```\n```sh\npython a/b.py\n```\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match="is not in the output"):
        execute(page, shell)
    page = tmp_path / "other.md"
    page.write_text("```sh\nrlhf plugins show nothing_of_that_name\n```\n")
    with pytest.raises(AssertionError, match="nothing_of_that_name"):
        execute(page, shell)


def test_the_readmes_plugin_passes_the_suites_of_its_kinds():
    module: dict[str, object] = {"__name__": "readme"}
    [plugin] = [b.text for b in blocks(ROOT / "README.md", "python") if "hookimpl" in b.text]
    exec(plugin, module)
    [declared] = [tomllib.loads(b.text) for b in blocks(ROOT / "README.md", "toml")]
    plugins = Plugins.discover()
    for kind in ("advantage", "algorithm"):
        [cls] = module[f"rlhf_register_{kind}"]()
        plugins.register(kind, cls)
        assert list(declared["project"]["entry-points"][f"rlhf.{kind}"]) == [cls.name]
    results = conformance.run(plugins.resolve("advantage", "centered"))
    assert len(results) > 5
    assert [r for r in results if not r.passed and r.name != "class"] == [], "`class` asks for a docstring"
    assert plugins.resolve("algorithm", "centered_gradient").cls.slots["advantage"].use == "centered"


def test_python_blocks_compile():
    for page in pages():
        for block in blocks(page, "python"):
            compile(textwrap.dedent(block.text), str(block), "exec")


# ---------------------------------------------------------------------------------------- generated


def test_generated_pages_equal_the_code():
    for name in ("run_file", "plugins"):
        reference = script(DOCS / f"reference/{name}.py")
        assert read(reference.PAGE) == reference.page(), f"run: python docs/reference/{name}.py"
    for page, text in script(DOCS / "reference/migrate.py").pages().items():
        assert read(page) == text, "run: python docs/reference/migrate.py"


def test_the_run_file_page_documents_every_field():
    text = read(DOCS / "reference/run-file.md").partition("## Reference")[2]
    assert {f"[{name}" for name in RunFile.model_fields} <= {
        line.removeprefix("### `").replace("[[", "[").split("]")[0].split(".")[0]
        for line in text.splitlines()
        if line.startswith("### ")
    }
    undocumented = re.findall(r"^\| `(\w+)` \|.*\|  \|$", text, re.MULTILINE)
    assert undocumented == []


def test_the_messages_of_the_run_file_page_are_real(tmp_path, capsys, monkeypatch):
    from rlhf_cli.main import main

    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        '[run]\nsed = 3\n[algorithm]\nuse = "grpo"\n[algorithm.loss]\nclip_high = 0.28\n[data]\nbatch_size = "16"\n'
    )
    assert main(["train", "run.toml", "--dry-run"]) == 2
    [block] = blocks(DOCS / "reference/run-file.md", "text")
    assert capsys.readouterr().err == block.text


# ------------------------------------------------------------------------------------- what is named


def test_json_blocks_hold_one_value_or_one_a_line():
    """The site's build stops at other blocks."""
    for page in pages():
        for block in blocks(page, "json"):
            try:
                json.loads(block.text)
            except ValueError:
                assert [json.loads(line) for line in block.text.splitlines()], block


def test_every_page_of_the_site_is_in_its_navigation():
    site = script(DOCS / "conf.py")
    entries = {line for name in site.INDEXES for line in site.navigation(name, read(ROOT / f"{name}.md")).splitlines()}
    sources = {path.relative_to(ROOT) for pattern in site.include_patterns for path in ROOT.glob(pattern)}
    paths = {f"/{path.with_suffix('')}" for path in sources if path.with_suffix("").as_posix() != site.root_doc}
    assert sorted(paths - entries) == []


def test_the_site_is_built_from_nothing():
    steps = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "sphinx-build" in steps.partition("rm -rf site")[2]


def test_links_resolve():
    for page in pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{name_of(page)} links to {link}, which is no file"
            if anchor:
                known_anchors = anchors(target)
                assert anchor in known_anchors, f"{name_of(page)} links to {link}; there are {known_anchors}"


def test_every_page_of_the_documentation_can_be_reached_from_its_index():
    linked = {
        (page.parent / link).resolve() for page in (DOCS / "README.md", ROOT / "README.md") for link in links(page)
    }
    assert {p for p in DOCS.rglob("*.md") if p.name != "README.md"} <= linked


def test_named_tests_and_files_exist():
    folders = "core|runtime|libraries|cli|plugins|testing|tests|docs|examples|benchmarks"
    for page in pages():
        for name in re.findall(rf"`((?:{folders})/[\w./-]+(?:::\w+)?)`", prose(page)):
            path, _, test = name.partition("::")
            assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
            if test:
                assert f"def {test}(" in (ROOT / path).read_text(), f"{name_of(page)} names {name}"


def test_commands_and_their_flags_exist():
    for page in pages():
        for words in commands(page):
            problem = wrong(words)
            assert not problem, f"{name_of(page)}: rlhf {' '.join(words)}: {problem}"


def test_a_wrong_command_is_detected():
    for line, problem in (
        ("trian run.toml", "no command 'trian'"),
        ("plugins lst", "no action 'lst'"),
        ("runs --algo x", "no flag --algo"),
        ("plugins list --kind x", "no flag --kind"),
        ("train --data.batchsize 3", "no field data.batchsize"),
        ("train --algorithm.loss.clip_hihg 3", "no field algorithm.loss.clip_hihg"),
        ("train --reward.math.wieght 3", "no field reward.math.wieght"),
    ):
        assert wrong(line.split()).startswith(problem)


def test_run_files_shown_have_only_fields_that_exist():
    for page in pages():
        for block in blocks(page, "toml"):
            document = tomllib.loads(block.text)
            if not set(document) <= set(RunFile.model_fields):
                assert "project" in document, f"{block} is neither a run file nor a distribution's metadata"
                continue
            for path in leaves(document):
                assert known(path), f"{block} sets {'.'.join(path)}, which does not exist"


# ------------------------------------------------------------------------------------------ checking


def wrong(words: list[str]) -> str:
    """The mistake in a command line of a page; empty if there is none."""
    command, *rest = words
    top = whole_parser(PLUGINS)
    if command.startswith("--"):
        return "" if command in {*flags_of(top), "--traceback"} else f"no flag {command}"
    parser = top
    if command not in ("COMMAND", "NAME", "X"):
        if command not in inner(top):
            return f"no command {command!r}"
        parser = inner(top)[command]
        if inner(parser) and rest and rest[0].islower():
            if rest[0] not in inner(parser):
                return f"no action {rest[0]!r}"
            parser = inner(parser)[rest[0]]
    flags, dotted = split_dotted(rest)
    for word in [w.strip("[]") for w in flags]:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in flags_of(parser) | {"--traceback"}:
            return f"no flag {word}"
    for word in dotted:
        path = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and not known(path.split(".")):
            return f"no field {path}"
    return ""


def inner(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of the program, or the actions of a command."""
    return next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), {})


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Those of a command and of its actions."""
    return {*parser._option_string_actions}.union(*(flags_of(p) for p in inner(parser).values()))


def leaves(table: object, path: tuple[str, ...] = ()) -> list[list[str]]:
    """Paths of all values; entries of lists of tables by their index. Options of plugins from files are left out."""
    if isinstance(table, dict) and str(table.get("use", "")).startswith("file:"):
        return [[*path, "use"]]
    if isinstance(table, dict) and table:
        return [leaf for key, value in table.items() for leaf in leaves(value, (*path, key))]
    if isinstance(table, list) and table and isinstance(table[0], dict):
        return [leaf for i, entry in enumerate(table) for leaf in leaves(entry, (*path, str(i)))]
    return [list(path)]


def known(path: list[str]) -> bool:
    """Whether a run file has the field: one of its own, or an option of some installed plugin."""
    head, *rest = path
    if head == "backend":
        return not rest
    if head not in RunFile.model_fields:
        return False
    if head in LISTS:
        free = rest[1:2] != [] and rest[1] in FREE_TABLES.get(head, ())
        own_field = len(rest) < 2 or rest[-1] in LISTS[head].model_fields
        return own_field or free or ".".join(rest[1:]) in plugin_options(head)
    if head == "algorithm" and rest[:1] == ["members"]:  # fields of the member itself, or options of its algorithm
        return ".".join(["members", "NAME", *rest[2:]]) in plugin_options(head) or known([head, *rest[2:]])
    if head in SINGLE:
        option = ".".join([*rest[:1], "NAME", *rest[2:]])  # an option in a table of a plugin's, with a name in between
        options = plugin_options(head)
        free = rest[:1] != [] and rest[0] in FREE_TABLES.get(head, ())
        return not rest or free or rest[-1] in SINGLE[head].model_fields or bool({".".join(rest), option} & options)
    return own(RunFile.model_fields[head].annotation, rest)


def own(annotation: object, rest: list[str]) -> bool:
    if not rest:
        return True
    item = item_of(annotation)
    if item is not None:  # the index or name of an entry, or the key of a table
        return model_of(item[1]) is None or own(item[1], rest[1:])
    model = model_of(annotation)
    if model is None or rest[0] not in model.model_fields:
        return False
    if rest[0] == "trainer":
        return ".".join(rest[1:]) in {"", *plugin_options("trainer")}
    return own(model.model_fields[rest[0]].annotation, rest[1:])


FREE_TABLES = {"env": {"kwargs", "task_config"}, "reward": {"criteria", "weights"}, "rollout": {"args"}}
"""Options that are tables with keys of the user's or of other projects."""
EXAMPLES = {"algorithm": {"advantage.k", "advantage.q"}}
"""Options of the plugin that docs/tutorial/first-algorithm.md makes."""


@cache
def plugin_options(kind: str) -> set[str]:
    """Option paths of all installed plugins of a kind; for algorithms also those of the parts in their slots."""
    plugins = Plugins.discover()
    option_paths = set(EXAMPLES.get(kind, ()))
    for entry in plugins.list(kind):
        cls = plugins.resolve(kind, f"{entry.distribution}/{entry.name}").cls
        option_paths |= paths(cls.Config) if hasattr(cls, "Config") else set()
        for name, slot in getattr(cls, "slots", {}).items() if kind == "algorithm" else ():
            option_paths |= {f"{name}.{option}" for option in {"use"} | plugin_options(slot.kind)}
    return option_paths


def paths(config: type) -> set[str]:
    """Option paths, and the paths of the tables that contain them."""
    names = {option["name"] for option in options(config)}
    return names | {name.rpartition(".")[0] for name in names if "." in name}
