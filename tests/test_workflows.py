"""The workflows, the hooks before a commit, the forms of issues and the citation are valid, and name what exists."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.members import ROOT, ROOT_PROJECT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())
HOOKS = ROOT / ".pre-commit-config.yaml"
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {name for line in re.findall(r"^([a-z][a-z -]*):(?!=)", MAKEFILE, re.MULTILINE) for name in line.split()}


def steps(path) -> list[dict[str, Any]]:
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


def test_there_are_workflows():
    assert [path.stem for path in WORKFLOWS] == ["gpu", "lint", "quick", "test"]
    assert {"quick", "test", "test-all", "lint", "docs"} <= TARGETS


def test_a_workflow_only_reads_and_its_jobs_end():
    for path in WORKFLOWS:
        content = yaml.safe_load(path.read_text())
        assert set(content) - {"concurrency"} == {"name", True, "permissions", "jobs"}, "the key `on` is read as true"
        assert content["name"] == path.stem
        assert content["permissions"] == {"contents": "read"}, path
        for job in content["jobs"].values():
            assert job["timeout-minutes"] > 0
            assert job["runs-on"]
            assert all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_a_workflow_names_targets_files_and_hosts_that_exist():
    for path in WORKFLOWS:
        commands = "\n".join(step.get("run", "") for step in steps(path))
        targets, files = re.findall(r"\bmake ([\w-]+)", commands), re.findall(r"[\w./-]+(?:\.py|Dockerfile)", commands)
        assert targets or files, path
        assert set(targets) <= TARGETS, path
        assert [name for name in files if not (ROOT / name).is_file()] == []
    for path in (*WORKFLOWS, HOOKS):
        assert set(re.findall(r"https?://([^/\s]+)", path.read_text())) <= {"github.com"}, path


def test_the_hooks_use_the_ruff_of_the_constraints():
    [version] = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    revisions = {entry["repo"]: entry["rev"] for entry in yaml.safe_load(HOOKS.read_text())["repos"]}
    assert revisions["https://github.com/astral-sh/ruff-pre-commit"] == f"v{version}"


def test_the_hook_for_the_ends_of_files_changes_no_file():
    """`pre-commit run --all-files`: every text file that it reads ends in one line break."""
    if not (ROOT / ".git").exists():
        pytest.skip("a checkout of git is missing, which lists the files")
    [hook] = [h for entry in yaml.safe_load(HOOKS.read_text())["repos"] for h in entry["hooks"] if "exclude" in h]
    assert hook["id"] == "end-of-file-fixer"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    contents = {name: (ROOT / name).read_bytes() for name in files.split("\0")[:-1]}
    texts = {name: content for name, content in contents.items() if content and b"\0" not in content}
    ends = {name for name, content in texts.items() if not content.endswith(b"\n") or content.endswith(b"\n\n")}
    assert {name for name in ends if not re.search(hook["exclude"], name)} == set()


def test_a_form_of_an_issue_has_what_the_forge_requires():
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"], path
        assert form["description"], path
        names = [field["id"] for field in form["body"]]
        assert len({*names}) == len(names) > 0, path
        assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in form["body"]), path


def test_the_citation_names_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (ROOT_PROJECT["version"], ROOT_PROJECT["license"])
