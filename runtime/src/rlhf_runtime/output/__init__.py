"""The folder of a run: its lock, its manifest, its files, ``metrics.jsonl``."""
