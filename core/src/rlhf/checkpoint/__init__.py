"""Checkpoints: written atomically, checksummed, rotated only after the new one is complete, compared before use."""

from rlhf.checkpoint.compare import Difference, compare, describe, require_same_run
from rlhf.checkpoint.json_values import dumps, loads, read_json, write_json
from rlhf.checkpoint.manifest import Checkpoint
from rlhf.checkpoint.store import CheckpointStore

__all__ = [
    "Checkpoint", "CheckpointStore", "Difference", "compare", "describe", "dumps", "loads", "read_json",
    "require_same_run", "write_json",
]  # fmt: skip
