"""Common parts of generators with inference engines: open requests, files of weights, and servers that are already
running."""
