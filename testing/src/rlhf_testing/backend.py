"""The conformance suite of backends.

::

    from rlhf_testing.backend import BackendContract

    class TestMyBackend(BackendContract):
        backend = MyBackend
"""

from __future__ import annotations

from typing import Any

from rlhf_testing.contract import Contract, Nonconformance, expect

PARTS = ("launcher", "trainer", "generator")


class BackendContract(Contract):
    """Checks that a backend names a launcher, a trainer and a generator, and does nothing else."""

    kind = "backend"
    backend: Any = None

    def test_references(self) -> None:
        """Launcher, trainer and generator are references, as a run file has them."""
        from rlhf.errors import ConfigError
        from rlhf.plugins import parse_reference

        for kind in PARTS:
            reference = getattr(self.cls, kind)
            given = isinstance(reference, str) and reference != ""
            expect(given, f"{self.about()} {kind} is {reference!r}: name the plugin, e.g. {kind} = 'local'")
            try:
                parse_reference(kind, reference)
            except ConfigError as error:
                raise Nonconformance(f"{self.about()} {kind} = {reference!r} is no reference: {error}") from error

    def test_no_options(self) -> None:
        """It has no options: those of its parts stand in their own sections."""
        options = sorted(self.cls.Config.model_fields)
        expect(not options, f"{self.about()} Config has {options}, which nobody can set: remove them")

    def test_installed(self) -> None:
        """Those of its parts that are installed can be imported; none is offered under two distributions."""
        from rlhf.errors import PluginError, PluginNotFound
        from rlhf.plugins import Plugins

        plugins = Plugins.discover()
        for kind in PARTS:
            try:
                plugins.resolve(kind, getattr(self.cls, kind))
            except PluginNotFound:
                continue  # the three may come from different distributions, and each may be left out
            except PluginError as error:
                raise Nonconformance(f"{self.about()} its {kind} cannot be used: {error}") from error
