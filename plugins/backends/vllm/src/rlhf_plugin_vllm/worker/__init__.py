"""The code that runs in each of an engine's workers: loading and checking weights."""
