"""Commands of the documentation: complete ones can be configured; named scripts, extras and checks exist."""

from __future__ import annotations

import argparse
import re
import tomllib

import pytest
from rlhf.errors import ConfigError
from rlhf.plugins import Plugins
from rlhf_cli.main import command_names, split_dotted
from rlhf_runtime.checks.order import checked
from rlhf_runtime.config.command_line import overrides
from rlhf_runtime.config.load import load

from tests.pages import ROOT, commands, name_of, pages, read, tables

REQUIREMENTS = {"--algo", "--model", "--data"}
"""A command with all of these flags is complete; other commands are fragments."""


def whole(words: list[str]) -> bool:
    command, *rest = words
    return (
        command in ("train", "plan") and set(rest) >= REQUIREMENTS and not any(word.endswith(".toml") for word in rest)
    )


def configure(words: list[str]) -> None:
    """Configure the run like the command, before it reads data or a model. Raises ConfigError."""
    command, *rest = words
    parser = argparse.ArgumentParser()
    plugins = Plugins.discover()
    plugins.resolve("command", command).cls().add_arguments(parser)
    arguments, dotted = split_dotted(rest)
    args = parser.parse_args(arguments)
    args.overrides = dotted
    checked(load(None, overrides(args)), plugins)


def test_the_page_of_the_command_has_all_of_it():
    page = read(ROOT / "cli" / "README.md")
    assert {words[0] for words in commands(ROOT / "cli" / "README.md")} >= set(command_names(Plugins.discover()))
    for action in ("preview", "export"):
        assert f"`rlhf data {action} " in page
    for action in ("list", "show", "check", "new"):
        assert f"`rlhf plugins {action} " in page


def test_extras_that_pages_install_exist():
    declared = {"rlhf-kit": tomllib.loads(read(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]}
    for member in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml")]:
        project = tomllib.loads(read(member))["project"]
        declared[project["name"]] = project.get("optional-dependencies", {})
    installs = {
        (page, *groups)
        for page in pages()
        for groups in re.findall(r"(?<![\w-])(rlhf[\w-]*)\[([a-z,-]+)\]", read(page))
    }
    assert {(name, extras) for _, name, extras in installs} == {
        ("rlhf-kit", "cluster"),
        ("rlhf-plugin-vllm", "cpu"),
        ("rlhf-plugin-vllm", "gpu"),
        ("rlhf-plugin-sglang", "server"),
        ("rlhf-plugin-swanlab", "swanlab"),
        ("rlhf-plugin-trackio", "trackio"),
    }
    assert [s for s in installs if s[1] not in declared or not set(s[2].split(",")) <= set(declared[s[1]])] == []


SCRIPT = re.compile(r"python ((?:benchmarks|examples|docs)/[\w/.-]+\.py)([^`\n#]*)")


def test_scripts_that_pages_call_exist_and_have_the_flags():
    calls = {(page, *groups) for page in pages() for groups in SCRIPT.findall(read(page))}
    assert len(calls) > 15
    for page, script, words in calls:
        assert (ROOT / script).exists(), f"{name_of(page)} calls {script}"
        source = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))
        for flag in re.findall(r"--[\w-]+", words):
            assert f'"{flag}"' in source, f"{name_of(page)} calls {script} with {flag}"


def test_every_check_of_the_doctor_is_on_its_page():
    folders = [ROOT / "cli/src/rlhf_cli/doctor", *(ROOT / "plugins").glob("*/*/src")]
    files = list(folders[0].rglob("*.py"))
    files += [
        path for folder in folders[1:] for path in folder.rglob("*.py") if "checks" in str(path.relative_to(ROOT))
    ]
    sources = "".join(path.read_text() for path in files)
    entries = {
        name
        for table in tables(ROOT / "docs/how-to/doctor.md")
        for row in table.rows
        for name in re.findall("`([^`]+)`", row.get("check", ""))
    }
    checks = set(re.findall(r'Finding\(\s*"([^"]+)"', sources))
    assert len(checks) > 20
    assert sorted(checks - entries) == []
    assert [name for name in sorted(entries - checks) if f'"{name}"' not in sources and name != "policy.model"] == []


def test_complete_commands_can_be_configured():
    complete = [(page, words) for page in pages() for words in commands(page) if whole(words)]
    assert len(complete) > 20
    for page, words in complete:
        try:
            configure(words)
        except ConfigError as error:
            pytest.fail(f"{name_of(page)}: rlhf {' '.join(words)}: {error}")
    with pytest.raises(ConfigError, match="an online run needs a reward"):
        configure(["train", "--algo", "grpo", "--model", "PATH", "--data", "FILE"])
