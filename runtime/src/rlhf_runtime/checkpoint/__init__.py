"""Checkpoints, written atomically and with checksums. Old checkpoints are deleted only after the new one is complete. A
checkpoint is compared with the run before use."""
