"""Runs an experiment: run file, data, the training loop, checkpoints, metrics."""
