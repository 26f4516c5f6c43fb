"""The conformance suite of backends.

::

    from rlhf_testing.backend import BackendContract

    class TestMyBackend(BackendContract):
        backend = MyBackend
"""

from __future__ import annotations

from typing import Any

from rlhf_testing.contract import Nonconformance, PluginContract, expect

PARTS = ("launcher", "trainer", "generator")


class BackendContract(PluginContract):
    """Checks that a backend names a launcher, a trainer and a generator, and does nothing else."""

    kind = "backend"
    backend: Any = None

    def test_references(self) -> None:
        """Launcher, trainer and generator are references, as in a run file."""
        from rlhf.errors import ConfigError
        from rlhf.plugins import parse_reference

        for kind in PARTS:
            reference = getattr(self.cls, kind)
            is_text = isinstance(reference, str) and reference != ""
            expect(is_text, f"{self.label()} {kind} is {reference!r}: name the plugin, e.g. {kind} = 'local'")
            try:
                parse_reference(kind, reference)
            except ConfigError as error:
                raise Nonconformance(f"{self.label()} {kind} = {reference!r} is not a reference: {error}") from error

    def test_installed(self) -> None:
        """The parts that are installed can be imported, and no part is offered by two distributions."""
        from rlhf.errors import PluginError, PluginNotFound
        from rlhf.plugins import Plugins

        plugins = Plugins.discover()
        for kind in PARTS:
            try:
                plugins.resolve(kind, getattr(self.cls, kind))
            except PluginNotFound:
                continue  # the three may come from different distributions, and each is optional
            except PluginError as error:
                raise Nonconformance(f"{self.label()} its {kind} cannot be used: {error}") from error
