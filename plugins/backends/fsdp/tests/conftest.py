"""Lets tests import the modules of this folder, and the programs of ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
