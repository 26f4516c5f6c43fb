"""Models in formats that are not read: GGUF files, and folders whose weights are pickles or GGUF files. They are
recognised by names and first bytes, and refused with the command that converts them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rlhf.errors import ModelError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
"""Weights that are never read: unpickling can run code, and the other formats belong to other frameworks."""
BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Either of them is there where transformers saved pickled weights."""
GGUF = ".gguf"


def is_gguf(file: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name: Ollama's have names of their own."""
    try:
        with file.open("rb") as content:
            return content.read(4) == b"GGUF"
    except OSError:  # what reads the file reports it
        return False


def refuse_other_formats(path: str) -> None:
    """Raises ModelError where a model's path is a file, or a folder whose weights are of another format only. Looks at
    names and the first bytes of a file."""
    place = Path(path).expanduser()
    if place.is_file():
        if is_gguf(place):
            raise ModelError(f"{path} is a GGUF file; a model is a folder with safetensors. {_convert(path)}")
        raise ModelError(
            f"no model {path}: it is a file. A model is a folder with config.json, safetensors and tokenizer"
        )
    if place.is_dir() and os.access(place, os.R_OK):
        names = sorted(entry.name for entry in place.iterdir())
        if problem := _other_weights(path, names):
            raise ModelError(problem + (_convert(path) if set(BIN_FILES) & {*names} else _first_gguf(path, names)))


def refuse_other_weights_on_hub(path: str, names: Sequence[str]) -> None:
    """The same for the files of a hub's repository: ``path``, ``owner/name@commit``, has files of these names.

    Raises ModelError.
    """
    if problem := _other_weights(path, names):
        name = path.partition("@")[0]
        download = f"hf download {name} --local-dir {name.rpartition('/')[2]}"
        raise ModelError(f"{problem}Download it (`{download}`) and convert what is there with `rlhf convert`.")


def _other_weights(path: str, names: Sequence[str]) -> str:
    """What is wrong with the weights of a folder with files of these names; empty: nothing, or it has none."""
    top = [name for name in names if "/" not in name]
    if any(name.endswith(".safetensors") for name in top):
        return ""
    pickles = [name for name in top if name.endswith(PICKLES)]
    if pickles:
        return f"{path} has its weights in {pickles[0]} only, which is not read: unpickling can run code. "
    files = [name for name in top if name.lower().endswith(GGUF)]
    if not files:
        return ""
    more = f" (and {len(files) - 1} more of its kind)" if files[1:] else ""
    return f"{path} has its weights in the GGUF file {files[0]}{more} only; a model is a folder with safetensors. "


def _first_gguf(folder: str, names: Sequence[str]) -> str:
    files = [name for name in names if name.lower().endswith(GGUF)]
    if files and not any(name.endswith(PICKLES) for name in names):
        return _convert(str(Path(folder) / files[0]))
    return "Convert it in a safe place: `AutoModel...from_pretrained(...).save_pretrained(folder)`."


def _convert(source: str) -> str:
    """The command that converts a file or folder, into a folder beside it that does not exist."""
    target = source.rstrip("/")
    target = target[: -len(GGUF)] if target.lower().endswith(GGUF) else f"{target}-safetensors"
    while Path(target).expanduser().exists():
        target += "-safetensors"
    return f"Convert it: `rlhf convert {shlex.quote(source)} {shlex.quote(target)}`, and name the new folder."
