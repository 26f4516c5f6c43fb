"""Each distribution works from its wheel: only itself, what it requires of ours, and third parties are visible."""

from __future__ import annotations

import json
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import rlhf
from flit_core import buildapi

from tests.members import MEMBERS, Member, name_of, required

pytestmark = pytest.mark.full

CODE = """
import json, os, sys, traceback
task = json.load(sys.stdin)
sys.path = [*task["standard"], task["third_parties"]]
import torch, transformers.modeling_utils
assert not [name for name in sys.modules if name.startswith("rlhf")]

def look(distribution, visible):
    sys.path[:0] = visible
    import rlhf
    from rlhf.plugins import Plugins

    plugins = Plugins.discover()
    visible = sorted({e.distribution for e in plugins.list()})
    shown = {"rlhf": rlhf.__file__, "visible": visible, "resolved": [], "slots": []}
    for entry in plugins.list():
        assert entry.status == "ok", entry
        if entry.distribution == distribution:
            cls = plugins.resolve(entry.kind, entry.name).cls
            shown["resolved"].append([entry.kind, cls.name])
            for slot in getattr(cls, "slots", {}).values():
                shown["slots"].append(plugins.resolve(slot.kind, slot.use).distribution)
    if distribution == "rlhf-cli":
        from rlhf_cli.main import main
        shown["written"] = main(["plugins", "new", "probe", "--kind", "reward", "--output", sys.path[0]])
    return shown

for distribution, visible in task["visible"].items():
    child = os.fork()
    if child == 0:
        try:
            shown = look(distribution, visible)
        except BaseException:
            shown = {"error": traceback.format_exc()}
        with open(os.path.join(task["answers"], distribution), "w") as file:
            json.dump(shown, file)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Imports what takes seconds, of third parties alone, and looks at each distribution in a child of its own."""


@pytest.fixture(scope="module")
def third_parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with links to everything in site-packages that is not ours."""
    folder = tmp_path_factory.mktemp("third_parties")
    for packages in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}:
        for found in Path(packages).iterdir():
            if not found.name.startswith(("rlhf", "__editable__")) and found.suffix != ".pth":
                link = folder / found.name
                if not link.exists():
                    link.symlink_to(found)
    return folder


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{distribution: folder with its unpacked wheel}."""
    folder = tmp_path_factory.mktemp("wheels")
    unpacked = {}
    with pytest.MonkeyPatch.context() as patch:
        for member in MEMBERS:
            patch.chdir(member.folder)
            wheel = folder / buildapi.build_wheel(str(folder))
            unpacked[member.name] = folder / member.name
            zipfile.ZipFile(wheel).extractall(unpacked[member.name])
    return unpacked


@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_a_wheel_holds_its_package_and_nothing_else(member: Member, wheels: dict[str, Path]) -> None:
    names = {p.name for p in wheels[member.name].iterdir()}
    assert names == {member.package, f"{member.name.replace('-', '_')}-{rlhf.__version__}.dist-info"}


@pytest.fixture(scope="module")
def answers(wheels: dict[str, Path], third_parties: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was seen of each distribution, in a file of its name."""
    folder = tmp_path_factory.mktemp("answers")
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    visible = {member.name: [str(wheels[m.name]) for m in required(member)] for member in MEMBERS}
    task = {"standard": standard, "third_parties": str(third_parties), "visible": visible, "answers": str(folder)}
    command = [sys.executable, "-I", "-S", "-c", CODE]
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_a_wheel_works_with_no_more_than_it_requires(member: Member, wheels: dict[str, Path], answers: Path) -> None:
    shown = json.loads((answers / member.name).read_text())
    assert "error" not in shown, shown["error"]
    assert shown["rlhf"].startswith(str(wheels["rlhf-core"])), "the wheel, not the folder it was built from"
    assert set(shown["visible"]) == {m.name for m in required(member) if m.entry_points}
    assert sorted(shown["resolved"]) == sorted([kind, name] for kind, name, _ in member.entry_points)
    assert set(shown["slots"]) <= {m.name for m in required(member)}
    if member.name == "rlhf-cli":
        assert shown["written"] == 0, "the scaffold's templates are in the wheel"
