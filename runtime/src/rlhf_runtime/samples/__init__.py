"""From data rows to scored groups of samples, and from these to training batches."""
