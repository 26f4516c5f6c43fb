"""The program of a worker process under another Python (:mod:`rlhf_runtime.calls.isolation`). It is run as a file,
because the other Python has no ``rlhf_runtime``. Before :func:`lend` is called, it imports only the standard library.

``PYTHON isolated_process.py SOCKET LENT``: LENT is JSON with the packages that the run lends and the plugin's metadata.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution
from typing import Any

OLDEST = (3, 11)


class LentMetadata(Distribution):
    """Metadata of a distribution that is installed in the run's Python."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._texts = texts

    def read_text(self, filename: str) -> str | None:
        return self._texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(path)


class LentPackages:
    """Finds the packages that the run lends. All other packages come from the other Python."""

    def __init__(self, folders: dict[str, str], metadata: dict[str, str]) -> None:
        self._folders, self._metadata = folders, metadata

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [self._folders[name]]) if name in self._folders else None

    def find_distributions(self, context: Any) -> list[Distribution]:
        distributions = [LentMetadata(self._metadata)] if self._metadata else []
        return [d for d in distributions if context.name in (None, d.metadata["Name"])]


def lend(packages: dict[str, Any]) -> None:
    """Let this process import the ``packages`` of the run. They take precedence over its own packages with the same
    name."""
    sys.meta_path.insert(0, LentPackages(packages["folders"], packages["metadata"]))


def main() -> None:
    if sys.version_info < OLDEST:
        sys.exit(
            f"{sys.executable} is Python {sys.version.split()[0]}; rlhf needs {'.'.join(map(str, OLDEST))} or newer"
        )
    del sys.path[0]  # the folder of this file
    lend(json.loads(sys.argv.pop()))
    try:
        from rlhf_runtime.calls.plugin_process import main as serve
    except ModuleNotFoundError as missing:
        sys.exit(f"{sys.executable} has no package {missing.name!r}, which rlhf-core needs; install it there")
    serve()


if __name__ == "__main__":
    main()
