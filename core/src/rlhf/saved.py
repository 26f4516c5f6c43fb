"""Checks of the files that a run reads back: fields and types, checked like those of a run file.

A file may have been edited, truncated or written by other software, with a new checksum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf.errors import CheckpointError, brief

Counter = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of steps, rows or updates."""


class Saved(BaseModel):
    """Base of the models of such files: values are not converted, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SavedPart(Saved):
    """Base of a model of part of a file. Other fields are ignored, because other code reads them."""

    model_config = ConfigDict(extra="ignore")


M = TypeVar("M", bound=Saved)
WAY_OUT = (
    "It was edited or damaged. Restore it from a copy, remove the folder of that step to resume from the checkpoint "
    "before it, or start a new run."
)


def validated(model: type[M], value: Any, path: Path | str) -> M:
    """``value``, which was read from the file ``path``, as an instance of ``model``.

    Raises CheckpointError with every field that is missing, unknown or of a wrong type, and what to do.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = [_line(entry) for entry in error.errors(include_url=False)]
    return refuse(path, *problems)


def refuse(path: Path | str, *problems: str) -> NoReturn:
    """Raises CheckpointError: the content of the file ``path`` was not written by a run."""
    raise CheckpointError("\n  ".join([f"{path} does not contain what a run saves:", *problems, WAY_OUT]))


def _line(error: Any) -> str:
    path = ".".join(map(str, error["loc"])) or "the file"
    if error["type"] == "missing":
        return f"{path}: missing."
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown, got {brief(error['input'])}."
    message = str(error["msg"]).removeprefix("Input ").removeprefix("Value error, ").partition(" or instance of ")[0]
    return f"{path}: {message}, got {brief(error['input'])}."
