"""Commands about the options of a run: `rlhf explain` and `rlhf init`."""
