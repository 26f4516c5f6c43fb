from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """``file(text)`` writes a file with that text and returns its reference."""

    def write(text: str) -> str:
        path = tmp_path / f"written_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        return f"file:{path}"

    return write
