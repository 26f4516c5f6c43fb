import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for server_under_test and what else the tests share
