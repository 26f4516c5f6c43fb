"""Folders of modules that drivers and workers of these tests import."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[3] / "libraries" / "workers" / "tests"
PATHS = os.pathsep.join((str(HERE), str(SHARED)))
"""For PYTHONPATH."""
