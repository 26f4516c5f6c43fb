"""A server of the Tinker protocol: `rlhf serve-training`."""
