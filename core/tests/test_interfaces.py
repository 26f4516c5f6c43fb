"""The interfaces are offered in one place, and each is imported when it is first used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf import interfaces
from rlhf.interfaces import KINDS, interface
from rlhf.plugins.entry import KINDS as NAMES


def test_every_kind_has_its_interface():
    assert {kind: interface(kind) for kind in NAMES} == KINDS


def test_every_name_is_offered_to_readers_and_type_checkers_alike():
    """A name stands in three lists: that of the files, that of the imports for type checkers, and ``__all__``."""
    [block] = [node for node in ast.parse(Path(interfaces.__file__).read_text()).body if isinstance(node, ast.If)]
    imported = {a.name: line.module for line in block.body if isinstance(line, ast.ImportFrom) for a in line.names}
    assert imported == {name: f"rlhf.interfaces.{file}" for name, file in interfaces._FILE_OF.items()}
    assert set(interfaces.__all__) == {*imported, "KINDS", "interface"}
    assert all(hasattr(interfaces, name) for name in interfaces.__all__)


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match=r"module 'rlhf\.interfaces' has no attribute 'Rewards'"):
        interfaces.Rewards  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Rewards'"):
        from rlhf.interfaces import Rewards  # noqa: F401


def test_a_command_starts_without_the_interfaces_of_a_run():
    code = "import sys; from rlhf.interfaces import Command; print(*sorted(m for m in sys.modules if 'rlhf.' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "rlhf.interfaces.command" in done.stdout.split(), done.stderr
    assert not {"rlhf.interfaces.trainer", "rlhf.interfaces.reward", "rlhf.types"} & set(done.stdout.split())
