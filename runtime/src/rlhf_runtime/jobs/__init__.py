"""Commands that use the parts of a run and do not train: `rlhf score`, `rlhf eval`, `rlhf generate`."""
