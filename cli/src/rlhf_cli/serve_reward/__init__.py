"""Command: serve rewards and reward models over HTTP."""
