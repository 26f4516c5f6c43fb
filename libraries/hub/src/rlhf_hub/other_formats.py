"""Models in formats that are not read: GGUF files, and folders whose weights are pickles or GGUF files. They are
recognised by names and first bytes. The error shows the command that converts them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
"""Weights that are never read. Unpickling can run code, and the other formats belong to other frameworks."""
BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""A folder with pickled weights from transformers has one of these files."""
GGUF = ".gguf"


class OtherFormat(NamedTuple):
    """Why a model is not read, and how to convert it."""

    reason: str
    remedy: str


def is_gguf(file: Path) -> bool:
    """Whether a file starts like a GGUF file, regardless of its name, because Ollama's files have different names."""
    try:
        with file.open("rb") as content:
            return content.read(4) == b"GGUF"
    except OSError:  # the reader of the file reports it
        return False


def refuse_other_formats(path: str) -> None:
    """Raises ModelError if a model's path is an :func:`other_format`."""
    if problem := other_format(path):
        raise ModelError(f"{problem.reason}. {problem.remedy[0].upper()}{problem.remedy[1:]}")


def other_format(path: str) -> OtherFormat | None:
    """The problem, if a model's path is a file, or a folder whose weights are only in another format."""
    place = Path(path).expanduser()
    if place.is_file():
        if is_gguf(place):
            return OtherFormat(f"{path} is a GGUF file; a model is a folder with safetensors", _command(path))
        needs = "a model is a folder with config.json, safetensors and tokenizer"
        return OtherFormat(f"{path} is a file, not a model", needs)
    if not place.is_dir() or not os.access(place, os.R_OK):
        return None
    names = sorted(entry.name for entry in place.iterdir())
    if (weights := _other_weights(names)) is None:
        return None
    if not weights.endswith(PICKLES):
        return OtherFormat(f"{path} has {_describe_weights(weights)}", _command(str(Path(path) / weights)))
    if {*BIN_FILES} & {*names}:
        return OtherFormat(f"{path} has {_describe_weights(weights)}", _command(path))
    remedy = "convert it in a safe place: `AutoModel...from_pretrained(...).save_pretrained(folder)`"
    return OtherFormat(f"{path} has {_describe_weights(weights)}", remedy)


def refuse_other_weights_on_hub(path: str, names: Sequence[str]) -> None:
    """Raises ModelError if a hub's repository ``path`` (``owner/name@commit``) with these file names has weights only
    in another format."""
    if (weights := _other_weights(names)) is not None:
        name = path.partition("@")[0]
        download = f"hf download {name} --local-dir {name.rpartition('/')[2]}"
        raise ModelError(
            f"{path} has {_describe_weights(weights)}. Download it (`{download}`), and convert the folder, or "
            "the GGUF file in it, with `rlhf convert`."
        )


def _other_weights(names: Sequence[str]) -> str | None:
    """The weights file among these names, if none of them is a safetensors file."""
    names = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") for name in names):
        return None
    pickles = [name for name in names if name.endswith(PICKLES)]
    files = [name for name in names if name.lower().endswith(GGUF)]
    files.sort(key=lambda name: "mmproj" in name.lower())  # the vision part of a model
    return next(iter([*pickles, *files]), None)


def _describe_weights(weights: str) -> str:
    reason = "unpickling can run code" if weights.endswith(PICKLES) else "a model is a folder with safetensors"
    return f"its weights only in {weights}, which rlhf does not read: {reason}"


def _command(source: str) -> str:
    """The command that converts a file or folder into a new folder beside it."""
    target = source.rstrip("/")
    target = target[: -len(GGUF)] if target.lower().endswith(GGUF) else f"{target}-safetensors"
    while Path(target).expanduser().exists():
        target += "-safetensors"
    return f"convert it, and use the new folder: rlhf convert {shlex.quote(source)} {shlex.quote(target)}"
