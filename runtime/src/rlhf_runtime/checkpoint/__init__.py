"""Checkpoints, written atomically and with checksums. Old checkpoints are deleted only after the new one is complete. A
checkpoint is compared with the run before use."""

from rlhf_runtime.checkpoint.compare import Difference, compare, describe, require_same_run
from rlhf_runtime.checkpoint.json_values import dumps, loads, read_json, write_json
from rlhf_runtime.checkpoint.store import Checkpoint, CheckpointStore

__all__ = [
    "Checkpoint", "CheckpointStore", "Difference", "compare", "describe", "dumps", "loads", "read_json",
    "require_same_run", "write_json",
]  # fmt: skip
