"""Backends: a launcher, a trainer and a generator under one name."""

from __future__ import annotations

from typing import ClassVar

from rlhf.interfaces.extension import Extension


class Backend(Extension):
    """A launcher, a trainer and a generator that work together, selected by ``--backend NAME``.

    The flag is short for ``--launcher.use``, ``--trainer.use`` and ``--generator.use``. Each is a reference, as in a
    run file. The three may come from different distributions. A backend imports none of them, and has no options and no
    methods. Options of the three stay in their own sections.

    A complete distribution is two files. ``pyproject.toml``::

        [build-system]
        requires = ["flit_core>=3.11,<5"]
        build-backend = "flit_core.buildapi"

        [project]
        name = "rlhf-plugin-sharded"
        version = "0.1.0"
        description = "Backend: one model in parts on the devices of this machine."
        dependencies = ["rlhf-core>=0.1,<0.2"]

        [project.entry-points."rlhf.backend"]
        sharded = "rlhf_plugin_sharded"

        [tool.flit.module]
        name = "rlhf_plugin_sharded"

    And ``src/rlhf_plugin_sharded/__init__.py``::

        \"\"\"Backend: one model in parts on the devices of this machine.\"\"\"

        from rlhf import hookimpl
        from rlhf.interfaces import Backend

        class Sharded(Backend):
            \"\"\"One model in parts on the devices of this machine, to train and to sample.\"\"\"

            name = "sharded"
            launcher = "local"
            trainer = "sharded"
            generator = "sharded"

        @hookimpl
        def rlhf_register_backend():
            return [Sharded]
    """

    launcher: ClassVar[str] = ""
    """Reference of the launcher; required."""
    trainer: ClassVar[str] = ""
    """Reference of the trainer; required."""
    generator: ClassVar[str] = ""
    """Reference of the generator; required."""
