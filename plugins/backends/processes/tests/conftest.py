"""Makes the modules of this folder importable by tests; workers get the import path of the driver."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
