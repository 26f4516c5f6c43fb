"""Data rows become scored groups of samples, and groups become training batches."""
