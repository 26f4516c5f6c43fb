"""Every distribution is complete, has the common version, and is listed in the installations."""

import importlib.metadata
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
import rlhf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rlhf.plugins import Plugins
from rlhf.plugins.entry import KINDS
from rlhf_cli.main import main

import install
from tests.members import BY_NAME, MEMBERS, PLUGINS, ROOT, ROOT_PROJECT, ours, required

MAJOR, MINOR = (int(part) for part in rlhf.__version__.split(".")[:2])
PIN = SpecifierSet(f">={MAJOR}.{MINOR},<{MAJOR}.{MINOR + 1}")


def test_there_are_members():
    assert {"rlhf-core", "rlhf-cli"} < set(BY_NAME)
    assert PLUGINS
    assert [m.name for m in MEMBERS if m.is_plugin and m not in PLUGINS] == []


def test_names_and_versions_follow_the_folder_and_the_root():
    for member in MEMBERS:
        folder = member.folder.name
        expected = f"rlhf-plugin-{folder.replace('_', '-')}" if member.is_plugin else f"rlhf-{folder}"
        assert member.name == expected
        assert member.package == ("rlhf" if member.name == "rlhf-core" else member.name.replace("-", "_"))
        assert (member.source / "__init__.py").is_file()
        assert member.project["version"] == ROOT_PROJECT["version"] == rlhf.__version__, member.name


def test_every_requirement_on_ours_has_the_lockstep_pin():
    for member in MEMBERS:
        for requirement in (*member.requirements, *member.optional):
            if requirement.name in BY_NAME:
                assert requirement.specifier == PIN, f"{member.name}: {requirement}"
        if member.name != "rlhf-core":
            assert BY_NAME["rlhf-core"] in ours(member.requirements), member.name


def test_metadata_are_complete_and_tools_are_configured_at_the_root_only():
    for member in MEMBERS:
        for key in ("requires-python", "license"):
            assert member.project[key] == ROOT_PROJECT[key], member.name
        assert member.project["description"].endswith("."), member.name
        assert set(member.pyproject) == {"build-system", "project", "tool"}, member.name
        assert set(member.pyproject["tool"]) == {"flit"}, member.name
        assert member.pyproject["build-system"]["build-backend"] == "flit_core.buildapi", member.name


def test_a_readme_says_what_the_member_offers():
    for member in MEMBERS:
        text = (member.folder / member.project["readme"]).read_text()
        assert text.startswith(f"# {member.name}\n")
        assert len(text.splitlines()) > 8, f"{member.name}: what it is, how to select it, its options, its sources"
        for _, name, _ in member.entry_points:
            assert re.search(rf"\b{name}\b", text), f"README.md of {member.name} does not mention {name!r}"


def test_entry_points_are_of_known_kinds_and_installed():
    """With an old editable install a new entry point is not found: install the folder again."""
    of_engines = {"rlhf-plugin-vllm": ["vllm.general_plugins"], "rlhf-plugin-sglang": ["sglang.srt.plugins"]}
    for member in PLUGINS:
        assert member.other_groups == of_engines.get(member.name, []), member.name
        for kind, name, module in member.entry_points:
            assert kind in KINDS, member.name
            assert re.fullmatch("[a-z0-9_]+", name), member.name
            assert module == member.package or (kind == "command" and module.startswith(f"{member.package}."))
        installed = importlib.metadata.distribution(member.name)
        plugin_points = [p for p in installed.entry_points if p.group.startswith("rlhf.")]
        points = [(p.group.removeprefix("rlhf."), p.name, p.value) for p in plugin_points]
        other_groups = {p.group for p in installed.entry_points if p not in plugin_points} - {"console_scripts"}
        assert sorted(other_groups) == member.other_groups, member.name
        assert sorted(points) == sorted(member.entry_points)
        assert installed.version == member.project["version"], member.name


def test_an_entry_point_is_a_class_of_its_name_and_can_be_shown(capsys):
    plugins = Plugins.discover()
    for member in PLUGINS:
        for kind, name, _ in member.entry_points:
            cls = plugins.resolve(kind, f"{member.name}/{name}").cls
            assert (cls.name, cls.__module__.split(".")[0]) == (name, member.package)
            assert main(["plugins", "show", f"{member.name}/{name}", "--kind", kind]) == 0
            out = capsys.readouterr().out
            assert out.startswith(f"{kind} {name}  ({member.name} {rlhf.__version__})")
            assert "(no docstring)" not in out, f"{kind} {name}"


def test_entry_points_load_without_frameworks_except_those_of_mathematics():
    """Every command may load all of them."""
    program = """
import sys
from importlib.metadata import entry_points

def frameworks(*names):
    return [name for name in names if name in sys.modules]

kinds = sys.argv[1:]
hooks = {(k, p.name): getattr(p.load(), f"rlhf_register_{k}") for k in kinds for p in entry_points(group=f"rlhf.{k}")}
assert len(hooks) > 50
assert frameworks("torch", "transformers", "ray", "mlflow", "tensorboard", "wandb") == []
for kind, name in hooks:
    if kind not in ("advantage", "launcher", "trainer", "generator"):
        hooks[kind, name]()
assert frameworks("torch", "transformers", "mlflow", "tensorflow") == []
"""
    subprocess.run([sys.executable, "-c", program, *sorted({*KINDS} - {"algorithm", "loss"})], check=True)


def test_no_two_members_offer_the_same_name():
    counts = Counter((kind, name) for m in PLUGINS for kind, name, _ in m.entry_points)
    assert [key for key, count in counts.items() if count > 1] == []


def test_editable_txt_installs_every_member():
    lines = (ROOT / "editable.txt").read_text().splitlines()
    folders = [line.removeprefix("-e ./").partition("[")[0] for line in lines if line.startswith("-e ./")]
    assert sorted(folders) == sorted(str(m.folder.relative_to(ROOT)) for m in MEMBERS)


def test_pip_builds_every_member_in_one_environment_and_then_installs_what_all_require():
    first, second = install.commands(install.places(small=False), uv=None)
    assert {"--no-deps", "--no-build-isolation"} < {*first}
    assert first.count("-e") == len(MEMBERS) + 1
    assert "--no-build-isolation" not in second, "third parties bring build tools of their own"
    names = [Requirement(word) for word in second[second.index("constraints.txt") + 1 :]]
    assert sorted(r.name for r in names) == sorted([*BY_NAME, "rlhf-kit"])
    assert {r.name: sorted(r.extras) for r in names if r.extras} == {
        "rlhf-cli": ["completion", "gguf"], "rlhf-plugin-vllm": ["cpu"], "rlhf-kit": ["dev"],
    }  # fmt: skip


def test_uv_gets_the_same_members_and_the_quick_start_fewer():
    [command] = install.commands(install.places(small=False), uv="uv")
    places = [place for word, place in pairwise(command) if word == "-e"]
    assert places == install.places(small=False)
    assert {"./cli[completion,gguf]", ".[dev]"} < {*places}
    assert {*install.places(small=True)} - {*places} == {".[test]"}, "plugins of one's own have tests"
    assert not [place for place in install.places(small=True) if "vllm" in place or "ray" in place]


@pytest.mark.parametrize(
    ("failing", "tools", "code"), [("", ["uv"], 0), ("uv", ["uv", "pip"], 0), ("up", ["uv", "pip"], 1)]
)
def test_pip_installs_where_uv_fails(monkeypatch, capsys, failing, tools, code):
    """uv does not read pip's configuration, so it may not have the index that a machine names there."""
    used: list[str] = []

    def run(command: list[str]) -> int:
        tool = "uv" if command[0] == "uv" else "pip"
        used.extend({tool} - {*used})
        return int(tool[0] in failing)

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install.shutil, "which", lambda name: name)
    assert install.main() == code
    assert used == tools
    assert ("installed in" in capsys.readouterr().out) == (code == 0)
    monkeypatch.setattr(install.sys, "platform", "darwin")
    with pytest.raises(SystemExit, match=r"no packages for macOS\. Use make quickstart"):
        install.main()


def test_the_root_requires_every_member_by_default_or_in_an_extra():
    extras = ROOT_PROJECT["optional-dependencies"]
    third_parties, collections = {"dev", "test", "lora", "qlora", "liger", "gguf", "tinker", "mcp"}, {"cluster"}
    plugin_requirements = [
        t for name, extra in extras.items() if name not in third_parties | collections for t in extra
    ]
    requirements = [Requirement(text) for text in (*ROOT_PROJECT["dependencies"], *plugin_requirements)]
    names = [r.name for r in requirements]
    libraries = {m.name for m in MEMBERS if m.folder.parent.name == "libraries" and not m.entry_points}
    assert sorted(names) == sorted({*BY_NAME} - libraries), "each exactly once"
    assert libraries <= {m.name for name in names for m in required(BY_NAME[name])}
    assert all(r.specifier == PIN for r in requirements)
    assert {t for name in collections for t in extras[name]} <= set(plugin_requirements), (
        "extras that only put others together"
    )


def test_an_algorithm_installs_the_program_that_runs_it():
    """``pip install rlhf-plugin-x`` is enough for ``rlhf train --algo x``."""
    members = [m for m in PLUGINS if "algorithm" in {kind for kind, _, _ in m.entry_points}]
    assert [m.name for m in members if BY_NAME["rlhf-cli"] not in required(m)] == []


def test_the_default_run_file_works_with_the_program_alone():
    """The default names of the run file belong to distributions that the program requires."""
    from rlhf_runtime.config.runfile import RunFile

    default = {m.name for m in required(BY_NAME["rlhf-cli"])}
    assert "rlhf-cli" in {Requirement(text).name for text in ROOT_PROJECT["dependencies"]}
    for kind in ("rollout", "trainer", "generator", "launcher"):
        name = RunFile.model_fields[kind].default.use
        assert Plugins.discover().resolve(kind, name).distribution in default
