"""Options of the rollout, and the check of the Python that they name."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any

from packaging.requirements import Requirement
from pydantic import Field
from rlhf.errors import ConfigError
from rlhf.fields import PathText
from rlhf_endpoint.config import ProgramConfig, check_environment

DISTRIBUTION = "rlhf-plugin-verifiers"
_VERSION = "import importlib.metadata as m\ntry: print(m.version('verifiers'))\nexcept m.PackageNotFoundError: print()"


class VerifiersConfig(ProgramConfig):
    id: Annotated[str, Field(min_length=1)]
    """The environment, as ``verifiers.load_environment`` takes it: the name of its module."""
    args: Mapping[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's own ``load_environment``."""
    python: PathText | None = None
    """The Python that has verifiers and the environment. Default: the Python of the run."""
    processes: Annotated[int, Field(gt=0)] = 1
    """Number of processes that load the environment and share the samples. More processes help if its rewards take long
    to compute."""


def own_python(python: str | None) -> str:
    """The absolute path. Links are not followed: a virtual environment is found by the path of its ``bin/python``."""
    return sys.executable if python is None else os.path.abspath(os.path.expanduser(python))


def check_python(config: VerifiersConfig) -> None:
    """Raises ConfigError: the Python does not exist, or has no verifiers of a version that is known to work."""
    check_environment(config)
    python = own_python(config.python)
    if shutil.which(python) is None:
        raise ConfigError(f"rollout.python: {python!r} is not a program. {_MAKE}")
    command = [python, "-I", "-c", _VERSION]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    requirement = required()
    if result.returncode:
        raise ConfigError(
            f"rollout.python: {python!r} is not a Python interpreter that starts: {result.stderr.strip()[-300:]}"
        )
    version = result.stdout.strip()
    if not version:
        raise ConfigError(f"rollout.python: {python!r} does not have the package verifiers. {_MAKE}")
    if version not in requirement.specifier:
        raise ConfigError(
            f"rollout.python: {python!r} has verifiers {version}, but {requirement} is required. Later versions have "
            f"no load_environment. {_MAKE}"
        )


def required() -> Requirement:
    """The requirement on verifiers that this distribution declares for the environment's Python."""
    texts = importlib.metadata.distribution(DISTRIBUTION).requires or []
    requirement = next(r for r in map(Requirement, texts) if r.name == "verifiers")
    requirement.marker = None
    return requirement


_MAKE = (
    "Create an environment with `rlhf plugins isolate verifiers --kind rollout --output envs/verifiers --with "
    "PACKAGE`, where PACKAGE is the environment's, and set python = 'envs/verifiers/bin/python'."
)
