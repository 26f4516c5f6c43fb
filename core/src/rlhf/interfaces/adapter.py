"""Adapters: turn what a foreign file defines into a component of ours."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from rlhf.interfaces.component import Component


class Adapter(Component):
    """Asked only for ``file:`` references whose file defines no component by itself."""

    @abstractmethod
    def recognises(self, kind: str, text: str) -> bool:
        """Whether the file (its source text) looks like one of this adapter's; must not execute it."""

    def importing(self) -> AbstractContextManager[None]:
        """Entered while the file is imported: may provide modules that the file expects."""
        return nullcontext()

    @abstractmethod
    def adapt(self, kind: str, module: ModuleType, attribute: str | None) -> type[Component]:
        """The component class that stands for the file. Raises PluginInvalid with what to do instead."""
