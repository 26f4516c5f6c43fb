"""Embedded runtime: torch trainer, transformers generator, everything in one process."""
