"""Ranks and engines in worker processes, as launchers start, call and watch them."""
