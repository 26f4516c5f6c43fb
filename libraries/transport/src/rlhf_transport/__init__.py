"""Weights on their way from a trainer to a generator: buckets of named tensors, each with a fingerprint."""
