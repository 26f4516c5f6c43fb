"""Ranks and engines in worker processes: how launchers start, call and monitor them."""
