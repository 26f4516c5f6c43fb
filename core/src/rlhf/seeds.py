"""Counter-based seeds: every random choice is a pure function of (run seed, purpose, counters).

There is no hidden generator state to save, so a resumed run makes the same choices as an uninterrupted one.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, purpose: str, *counters: int) -> int:
    """A 63-bit seed from the run's seed, a purpose ("sample", "order", ...) and any number of counters."""
    text = "/".join([str(run_seed), purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
