"""Checks of a run file on this machine: models, data, output folder."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rlhf.errors import ModelError, short_list
from rlhf.interfaces import Finding
from rlhf_hub.adapter_folders import ADAPTER_WEIGHTS, adapter_of, require_base
from rlhf_hub.other_formats import other_format
from rlhf_hub.published import looks_local
from rlhf_runtime.checkpoint.store import STATE_BYTES
from rlhf_runtime.config.runfile import RunFile
from rlhf_runtime.data.loading import file_kind
from rlhf_runtime.output.run_folder import default_folder, is_free

from rlhf_cli.doctor.machine import disk, gib


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters and bytes of the weights in a model's folder."""

    parameters: int
    bytes: int


def models(config: RunFile) -> tuple[list[Finding], dict[str, Weights]]:
    """A check for each model that the run file names, and the sizes of those that were read."""
    checks, sizes = [], {}
    for place, path in model_paths(config).items():
        if not looks_local(path):
            text = f"{path} is not a folder here, so it is a hub name, loaded from the hub or its cache at the start"
            checks.append(Finding(place, "skipped", text))
            continue
        if problem := other_format(path):
            checks.append(Finding(place, "fail", *problem))
            continue
        try:
            base = base_of(path)
            if not looks_local(base):
                text = f"{path} is an adapter of {base}, a hub name, loaded from the hub or its cache at the start"
                checks.append(Finding(place, "skipped", text))
                continue
            sizes[place] = read_model(Path(base).expanduser())
        except (OSError, ValueError, ModelError) as error:
            fix = "copy or download the model's folder again, or correct its path"
            checks.append(Finding(place, "fail", f"{path}: {error}", fix))
            continue
        size = sizes[place]
        checks.append(Finding(place, "ok", f"{path}: {size.parameters / 1e6:.1f} M parameters, {gib(size.bytes)}"))
    return checks, sizes


def model_paths(config: RunFile) -> dict[str, str]:
    """{option: path} of every model."""
    paths = {f"{path}.model": section.model for path, section in config.models.items() if section.model is not None}
    for number, reward in enumerate(config.reward):
        if reward.use.startswith("model:"):
            paths[f"reward.{number}"] = reward.use.removeprefix("model:")
    return paths


def base_of(path: str) -> str:
    """The base of an adapter's folder; any other path itself.

    Raises ModelError, OSError or ValueError if the adapter cannot be used.
    """
    if (adapter := adapter_of(path)) is None:
        return path
    require_base(adapter)
    _safetensors(adapter.folder / ADAPTER_WEIGHTS)
    return adapter.base


def read_model(folder: Path) -> Weights:
    """Read a Hugging Face folder's config and the headers of its weights, not the weights.

    Raises OSError or ValueError, which say which file is missing, unreadable or truncated.
    """
    if not folder.is_dir():
        raise ValueError("there is no such folder")
    read_json(folder / "config.json")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{index.name} has no weight_map")
        names = sorted(set(weight_map.values()))
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise ValueError(f"{len(absent)} of {len(names)} files of weights are missing: {short_list(absent)}")
    if not names:
        raise ValueError("it holds no *.safetensors")
    sizes = [_safetensors(folder / name) for name in names]
    return Weights(sum(s.parameters for s in sizes), sum(s.bytes for s in sizes))


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError or ValueError naming the file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path.name} is not a JSON object: {error}") from None


def _safetensors(path: Path) -> Weights:
    """Read from the header, which is its length (8 bytes) and a JSON object of shapes and offsets."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(f"{path.name} is not a safetensors file, or is truncated ({size} bytes)")
        header = json.loads(file.read(length))
    try:
        tensors = [value for name, value in header.items() if name != "__metadata__"]
        end = max((t["data_offsets"][1] for t in tensors), default=0)
        parameters = sum(prod(tensor["shape"]) for tensor in tensors)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path.name} has a header without shapes and offsets of tensors: {error}") from None
    if size != 8 + length + end:
        raise ValueError(f"{path.name} has {size} bytes, but its header says {8 + length + end}: truncated or damaged")
    return Weights(parameters, size)


def data(config: RunFile) -> Finding:
    """Whether every source can be read."""
    paths = [source.path for source in (*config.data.train, *config.data.eval)]
    names = [p for p in paths if not looks_local(p) and file_kind(Path(p)) is None]
    missing = [p for p in paths if p not in names and not os.access(Path(p).expanduser(), os.R_OK)]
    if missing:
        fix = "correct data.train or data.eval; paths are relative to the folder that rlhf is started in"
        return Finding("data", "fail", f"cannot be read: {short_list(missing)}", fix)
    if not paths:
        return Finding("data", "fail", "data.train names no source", "give --data FILE")
    note = f"; hub names are not looked up: {short_list(names)}" if names else ""
    count = len(paths) - len(names)
    return Finding("data", "ok", f"{count} source{'s' * (count != 1)} can be read{note}")


def output(config: RunFile, sizes: dict[str, Weights]) -> list[Finding]:
    """Whether the run directory can be written, holds no other run, and has room for the checkpoints."""
    has_output = "output" in config.run.model_fields_set
    path = (
        Path(config.run.output).expanduser()
        if has_output
        else default_folder(config.run.resume or config.run.overwrite)
    )
    place = existing(path)
    if not place.is_dir():
        fix = "choose another folder with --output"
        return [Finding("output", "fail", f"{path}: {place} is a file", fix)]
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".rlhf-doctor-") as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return [Finding("output", "fail", f"{place} cannot be written: {error.strerror}", "choose another --output")]
    trained = [size.parameters for name, size in sizes.items() if name in ("policy.model", "critic.model")]
    copies = config.checkpoint.keep + 2  # the best checkpoint, and the one that is being written
    need = sum(trained) * STATE_BYTES * copies
    room = disk(place, "output disk", need, f"{copies} checkpoints of all weights with Adam's moments in fp32")
    has_run = (path / "config.toml").exists()
    if has_run and not (config.run.resume or config.run.overwrite or is_free(path)):
        fix = "continue it with --resume, delete it with --overwrite, or choose another folder with --output"
        return [Finding("output", "fail", f"{path} already holds a run", fix), room]
    if config.run.resume and not has_run:
        return [Finding("output", "fail", f"there is no run to resume in {path}", "omit --resume"), room]
    return [Finding("output", "ok", f"{path} can be written"), room]


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())
