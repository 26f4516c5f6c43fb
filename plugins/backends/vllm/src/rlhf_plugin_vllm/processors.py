"""Lets vLLM's processes read images without torchvision.

vLLM calls :func:`prepare` in each of its processes (entry point ``vllm.general_plugins``), before it imports a model.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

IMAGES = "RLHF_VLLM_IMAGES"
"""Environment variable: set while an engine of an image-text model starts."""
IMPORTED = (
    "pixtral.image_processing_pixtral",
    "qwen2_vl.image_processing_qwen2_vl",
    "qwen2_vl.video_processing_qwen2_vl",
)
"""Modules of transformers that vLLM imports only for numbers, but that import torchvision for other purposes."""
_MISSING = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def prepare() -> None:
    """If torchvision is missing, import :data:`IMPORTED` and let transformers build image processors."""
    if not os.environ.get(IMAGES):
        return
    from rlhf_hub.processors import build_without_torchvision
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():  # transformers caches the result
        return
    build_without_torchvision()
    with _standing_in():
        for name in IMPORTED:
            importlib.import_module(f"transformers.models.{name}")


class _Nothing(ModuleType):
    """A module whose attributes are all None."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextmanager
def _standing_in() -> Iterator[None]:
    """Context in which torchvision is imported as empty modules."""
    for name in _MISSING:
        module = sys.modules[name] = _Nothing(name)
        module.__spec__ = ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in _MISSING:
            del sys.modules[name]
