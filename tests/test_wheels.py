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

CODE = """
import json, sys
distribution, *sys.path = json.loads(sys.argv[1])
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
    shown["resolved"].append(main(["plugins", "new", "probe", "--kind", "reward", "--output", sys.path[0]]))
sys.stderr.write(json.dumps(shown))
"""


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


@pytest.mark.parametrize("member", MEMBERS, ids=name_of)
def test_a_wheel_works_with_no_more_than_it_requires(
    member: Member, wheels: dict[str, Path], third_parties: Path
) -> None:
    visible = [str(wheels[m.name]) for m in required(member)]
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    argument = json.dumps([member.name, *visible, *standard, str(third_parties)])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", CODE, argument], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stderr.splitlines()[-1])
    assert shown["rlhf"].startswith(str(wheels["rlhf-core"])), "the wheel, not the folder it was built from"
    assert set(shown["visible"]) == {m.name for m in required(member) if m.is_plugin}
    if member.is_plugin:
        assert sorted(shown["resolved"]) == sorted([kind, name] for kind, name, _ in member.entry_points)
        assert set(shown["slots"]) <= {m.name for m in required(member)}
    if member.name == "rlhf-cli":
        assert shown["resolved"] == [0], "the scaffold's templates are in the wheel"
