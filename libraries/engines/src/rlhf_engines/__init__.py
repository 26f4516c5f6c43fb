"""Generators of inference engines: open requests, files of weights, and servers that are already running."""
