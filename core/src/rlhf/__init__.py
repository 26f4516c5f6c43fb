"""rlhf: post-train language models from feedback, with every algorithm, reward and environment a plugin.

Importing this package imports no torch. The contract is :mod:`rlhf.hookspecs` and :mod:`rlhf.interfaces`.
``rlhf.train`` runs an experiment from Python; it is part of the distribution ``rlhf-runtime``.
"""

from typing import Any

from pluggy import HookimplMarker

__version__ = "0.1.0"

hookimpl = HookimplMarker("rlhf")
"""Decorator of the functions that register the classes of a plugin module."""

_RUNTIME = "rlhf_runtime"


def __getattr__(name: str) -> Any:
    """``rlhf.train``, imported at its first use, because it imports the runtime and torch."""
    if name != "train":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        return importlib.import_module(f"{_RUNTIME}.python").train
    except ModuleNotFoundError as missing:
        if missing.name != _RUNTIME:
            raise
        raise ModuleNotFoundError(
            "rlhf.train is part of the distribution rlhf-runtime, which is not installed. Try: pip install "
            "rlhf-runtime, and the plugins that the run uses",
            name=_RUNTIME,
        ) from None


def __dir__() -> list[str]:
    return sorted([*globals(), "train"])
