"""Commands: subcommands of the program ``rlhf``."""

from __future__ import annotations

from abc import abstractmethod
from argparse import ArgumentParser, Namespace
from typing import ClassVar

from rlhf.interfaces.extension import Extension


class Command(Extension):
    """A subcommand of the program: ``rlhf NAME``.

    ``rlhf NAME --help`` shows the class docstring. ``rlhf --help`` shows the first line of the docstring of the entry
    point's module. It reads that line from the file and imports nothing, so a broken command does not break the others.
    The module is imported when the command is called: import light modules at its top, and heavy ones inside
    :meth:`run`. The options of a command are its arguments.

    A complete distribution is two files. ``pyproject.toml``::

        [build-system]
        requires = ["flit_core>=3.11,<5"]
        build-backend = "flit_core.buildapi"

        [project]
        name = "rlhf-plugin-hello"
        version = "0.1.0"
        description = "Command: say hello."
        dependencies = ["rlhf-core>=0.1,<0.2"]

        [project.entry-points."rlhf.command"]
        hello = "rlhf_plugin_hello"

        [tool.flit.module]
        name = "rlhf_plugin_hello"

    And ``src/rlhf_plugin_hello/__init__.py``::

        \"\"\"Say hello.\"\"\"

        from rlhf import hookimpl
        from rlhf.interfaces import Command

        class Hello(Command):
            \"\"\"Say hello to somebody: `rlhf hello --to Ada`.\"\"\"

            name = "hello"

            def add_arguments(self, parser):
                parser.add_argument("--to", default="you", metavar="NAME", help="who is greeted (default: you)")

            def run(self, args):
                print(f"Hello, {args.to}.")
                return 0

        @hookimpl
        def rlhf_register_command():
            return [Hello]
    """

    run_file_flags: ClassVar[bool] = False
    """Whether the command takes flags of the run file, such as ``--trainer.lr 1e-5``. If True, flags that
    :meth:`add_arguments` did not add are accepted and passed as ``args.overrides``, a list of words."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the command's arguments. The parser is that of ``rlhf NAME``; its description is set."""

    @abstractmethod
    def run(self, args: Namespace) -> int:
        """Do the work.

        Args:
            args: the arguments that :meth:`add_arguments` added, and ``overrides`` if :attr:`run_file_flags` is True.

        Returns the exit code: 0 for success, 1 for failure, 2 for wrong usage. It may raise errors of
        :mod:`rlhf.errors` instead: the program writes their message to standard error and exits with 2 for a wrong
        usage or configuration, else with 1.
        """
