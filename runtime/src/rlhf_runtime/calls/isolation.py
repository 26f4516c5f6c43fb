"""Worker processes that run under another Python, for example the Python of a virtual environment with packages that
cannot be installed together with the run's packages.

The other Python needs the requirements of ``rlhf-core`` and the packages that the plugin uses there. It needs no
distribution of this project: it imports the core, the worker's program and the plugin from the files of this process
(``isolated_process.py``), so their versions are equal.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import rlhf
from packaging.requirements import Requirement
from rlhf.errors import ConfigError
from rlhf.plugins import Resolved
from rlhf.plugins.resolved import FILE, IN_PROCESS, MODULE

import rlhf_runtime

EXTRA = "isolated"
"""The extra in which a plugin's distribution declares requirements for its own Python only."""
PROGRAM = Path(__file__).with_name("isolated_process.py")
CORE = "rlhf-core"


def check_python(resolved: Resolved, python: str, in_worker: bool) -> None:
    """Check the option ``python`` of a plugin's section. Starts no process. Raises ConfigError.

    Args:
        in_worker: whether the plugin's methods are plain ``def`` and so run in worker processes.
    """
    if not in_worker:
        raise ConfigError(
            f"python = {python!r}: the methods of {resolved} are `async def`, which run in the process of the run. "
            "Only plain `def` methods run in a worker process, which can have its own Python. Remove `python`."
        )
    if resolved.distribution == IN_PROCESS:
        raise ConfigError(
            f"python = {python!r}: {resolved} is defined in this process and cannot be copied to another Python. Move "
            "it to a file ('file:PATH.py') or a distribution."
        )
    if not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise ConfigError(
            f"python = {python!r} of {resolved} is not an executable file (looked at {_absolute(python)}). Name the "
            "Python of a virtual environment, DIR/bin/python. `rlhf plugins isolate` makes one."
        )


def command(resolved: Resolved, python: str, *arguments: str) -> list[str]:
    """The command line of a worker process under ``python``."""
    modules = [rlhf.__name__, rlhf_runtime.__name__]
    metadata = {}
    if resolved.distribution not in (FILE, MODULE):
        modules.append(resolved.cls.__module__.partition(".")[0])
        distribution = importlib.metadata.distribution(resolved.distribution)
        header = (distribution.read_text("METADATA") or "").partition("\n\n")[0]  # without the README
        metadata = {"METADATA": header, "entry_points.txt": distribution.read_text("entry_points.txt") or ""}
    packages = json.dumps({"folders": {name: _folder(name) for name in modules}, "metadata": metadata})
    return [_absolute(python), "-s", str(PROGRAM), *arguments, packages]


def environment(python: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of such a worker. The other Python's programs come first on PATH."""
    variables = {k: v for k, v in inherited.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    folder = os.path.dirname(_absolute(python))
    return variables | {"PATH": os.pathsep.join([folder, *filter(None, [variables.get("PATH")])])}


def requirements(resolved: Resolved) -> list[str]:
    """The requirements of a Python that runs the plugin: those of the core, of the plugin's distribution, and of its
    extra :data:`EXTRA`. Distributions of this project are left out, because they are lent."""
    owners = [CORE] if resolved.distribution in (FILE, MODULE) else [CORE, resolved.distribution]
    texts = [text for owner in owners for text in importlib.metadata.distribution(owner).requires or []]
    return [text for text in texts if not Requirement(text).name.startswith("rlhf-")]


def to_install(resolved: Resolved) -> list[str]:
    """:func:`requirements` that apply to this machine, as arguments of pip."""
    all_requirements = [Requirement(text) for text in requirements(resolved)]
    applying = [r for r in all_requirements if r.marker is None or r.marker.evaluate({"extra": EXTRA})]
    for requirement in applying:
        requirement.marker = None
    return [str(requirement) for requirement in applying]


def _folder(module: str) -> str:
    """The folder of a top-level module or package of this process."""
    file = Path(sys.modules[module].__file__ or "").absolute()
    return str(file.parent.parent if file.name == "__init__.py" else file.parent)


def _absolute(python: str) -> str:
    """The absolute path. Links are not followed, because Python finds a virtual environment by the path of its
    ``bin/python``, which is a link."""
    return os.path.abspath(os.path.expanduser(python))
