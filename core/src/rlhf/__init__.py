"""rlhf: post-train language models from feedback, with every algorithm, reward and environment a plugin.

Importing this package imports no torch. The contract is :mod:`rlhf.hookspecs` and :mod:`rlhf.interfaces`.
"""

from pluggy import HookimplMarker

__version__ = "0.1.0"

hookimpl = HookimplMarker("rlhf")
"""Marks the functions by which a plugin module registers its classes."""
