"""A trainer's state on disk: tensors in safetensors, the rest in JSON, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from rlhf.errors import CheckpointError
from rlhf.saved import Counter, Saved, SavedPart, refuse, validated
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
FACTS = "trainer.json"


class SavedCoverage(Saved):
    without_gradient: list[str]
    unchanged: list[str]


class SavedFacts(SavedPart):
    """Fields of ``trainer.json`` that every trainer reads; others belong to one trainer."""

    updates: Counter
    skipped: Counter
    precision: Literal["fp32", "bf16"]
    coverage: SavedCoverage | None


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by Hugging Face name, in a fixed order. Tied tensors occur once."""
    keys: set[int] = set()
    tensors = {}
    for name, tensor in module.state_dict().items():
        # Tensors without memory all have the address 0.
        key = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
        if key not in keys:
            keys.add(key)
            tensors[name] = tensor
    return tensors


def write(path: Path, files: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> None:
    """Write ``<name>.safetensors`` per entry, then ``trainer.json``. The caller makes the folder appear atomically."""
    path.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file({k: v.detach().contiguous().cpu() for k, v in tensors.items()}, path / f"{name}.safetensors")
    text = json.dumps({"format": FORMAT, **facts}, indent=2, sort_keys=True)
    (path / FACTS).write_text(text + "\n", encoding="utf-8")


def read_facts(path: Path) -> dict[str, Any]:
    """``trainer.json`` of a trainer's folder. Raises CheckpointError if a field is missing or of another type."""
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        raise CheckpointError(f"cannot read {FACTS} in {str(path)!r}: {cause}. Is this a trainer's folder?") from cause
    if isinstance(facts, dict) and facts.get("format") != FORMAT:
        raise CheckpointError(f"{str(path / FACTS)!r} has format {facts.get('format')!r}; this version reads {FORMAT}")
    validated(SavedFacts, facts, path / FACTS)
    return dict(facts)


def read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    file = path / f"{name}.safetensors"
    try:
        return load_file(file)
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"cannot read {str(file)!r}: {cause}. It is incomplete or damaged.") from cause


def check_values(target: Mapping[str, Tensor], source: Mapping[str, Tensor], label: Path | str) -> None:
    """Raises CheckpointError for a tensor of the file with another number format than its target, which torch would
    convert silently. Also for a tensor with NaN or infinity that a model of this kind does not have."""
    wrong = [
        f"{name}: a tensor of {source[name].dtype}, expected {tensor.dtype}."
        for name, tensor in target.items()
        if name in source and source[name].dtype != tensor.dtype
    ]
    if wrong:
        refuse(label, *wrong[:3])
    for name, tensor in target.items():  # a buffer may hold infinities, such as a mask
        if name in source and (problem := not_finite(source[name])) and not not_finite(tensor):
            refuse(label, f"{name}: {problem}.")


def not_finite(tensor: Tensor) -> str:
    """A text with the number of NaN or infinite values of a tensor; empty if there are none. A run skips updates with
    such gradients, so it does not save such values."""
    if not tensor.is_floating_point() or bool(tensor.isfinite().all()):
        return ""
    return f"{int((~tensor.isfinite()).sum())} of {tensor.numel()} values are NaN or infinite"


@torch.no_grad()
def copy_into(target: Mapping[str, Tensor], source: Mapping[str, Tensor], label: str) -> None:
    """Copy each source tensor into the tensor of the same name in ``target``. Names and shapes must be the same."""
    if target.keys() != source.keys():
        missing, unknown = sorted(target.keys() - source.keys()), sorted(source.keys() - target.keys())
        raise CheckpointError(
            f"{label} is of another model: missing {missing[:3] or 'nothing'}, unknown {unknown[:3] or 'nothing'}"
        )
    for name, tensor in target.items():
        if tensor.shape != source[name].shape:
            raise CheckpointError(
                f"{label} is of another model: {name!r} has shape {tuple(source[name].shape)}, "
                f"expected {tuple(tensor.shape)}"
            )
    for name, tensor in target.items():
        tensor.copy_(source[name])
