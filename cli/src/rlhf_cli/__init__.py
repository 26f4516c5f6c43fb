"""The command rlhf."""
