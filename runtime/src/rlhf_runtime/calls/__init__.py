"""Calls of plugins' code: worker processes, threads and the event loop, each call within a deadline."""
