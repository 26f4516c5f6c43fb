"""Options of the rollout, and checks of the files and programs that they name."""

from __future__ import annotations

import os
import re
import shutil
import symtable
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator
from rlhf.errors import ConfigError
from rlhf.fields import PathText
from rlhf_endpoint.config import ProgramConfig, check_environment

_PROGRAM = re.compile(r"file:(?P<path>.+\.py):(?P<function>[A-Za-z_]\w*)")


class AgentConfig(ProgramConfig):
    program: str | None = None
    """``file:PATH.py:FUNCTION``: a function ``(task, base_url, api_key)``, ``def`` or ``async def``."""
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """A command in place of ``program``. It gets the task as JSON on its standard input."""
    python: PathText | None = None
    """The Python that runs ``program``, such as that of a virtual environment. Default: the Python of the run."""
    returns_reward: bool = False
    """The program returns the reward. If False, it returns nothing, and ``[[reward]]`` scores the sample."""

    @model_validator(mode="after")
    def _one_program(self) -> AgentConfig:
        if (self.program is None) == (self.command is None):
            raise ValueError("set exactly one of program = 'file:PATH.py:FUNCTION' and command = [...]")
        if self.program is not None and not _PROGRAM.fullmatch(self.program):
            raise ValueError(f"program is {self.program!r}; allowed: 'file:PATH.py:FUNCTION'")
        if self.command is not None and self.python is not None:
            raise ValueError("python applies only to program; a command names its own interpreter")
        return self

    @property
    def own_python(self) -> str | None:
        """Path of :attr:`python`, which may be a name that is searched on PATH. None: the Python of the run."""
        if self.python is None:
            return None
        path = os.path.expanduser(self.python)
        return shutil.which(path) or path

    @property
    def function(self) -> tuple[Path, str]:
        """File and name of the function."""
        match = _PROGRAM.fullmatch(self.program or "")
        assert match is not None
        return Path(match["path"]).expanduser().resolve(), match["function"]


def check_program(config: AgentConfig) -> None:
    """Raises ConfigError: the file, its function, the Python or the command does not exist. Runs nothing."""
    check_environment(config)
    if config.command is not None:
        if shutil.which(config.command[0]) is None:
            raise ConfigError(
                f"rollout.command: the program {config.command[0]!r} was not found. Give its path, or install it."
            )
        return
    path, function = config.function
    try:
        table = symtable.symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except OSError as error:
        raise ConfigError(
            f"rollout.program: cannot read {str(path)!r}: {error.strerror}. Give the path of a file and the name of "
            "its function, file:PATH.py:FUNCTION."
        ) from None
    except (SyntaxError, ValueError) as error:  # ValueError: text that is not UTF-8, or a null byte
        raise ConfigError(f"rollout.program: cannot read {str(path)!r} as Python: {error}") from None
    symbols = [s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()]
    if function not in symbols:
        raise ConfigError(
            f"rollout.program: {path} defines no {function!r}; it defines {', '.join(symbols) or 'nothing'}"
        )
    if config.own_python is not None and shutil.which(config.own_python) is None:
        raise ConfigError(f"rollout.python: {config.python!r} is not a program. Give the path of a Python interpreter.")
