"""Commands that read run directories: `rlhf runs`, `rlhf show` and `rlhf samples`."""
