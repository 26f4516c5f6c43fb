"""Adapters: make a component from a file written for another framework."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

from rlhf.interfaces.component import Component


class Adapter(Component):
    """Used only for ``file:`` references to a file that defines no component."""

    @abstractmethod
    def recognises(self, kind: str, text: str) -> bool:
        """Whether this adapter can handle the file with the source ``text``. It must not execute the file."""

    def importing(self) -> AbstractContextManager[None]:
        """A context that is active while the file is imported. It may provide modules that the file imports."""
        return nullcontext()

    @abstractmethod
    def adapt(self, kind: str, module: ModuleType, attribute: str | None) -> type[Component]:
        """A component class made from the file. Raises PluginInvalid, saying what to do instead."""
