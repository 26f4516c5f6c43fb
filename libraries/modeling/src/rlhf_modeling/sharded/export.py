"""Writes a Hugging Face folder from a stream of weights. Rank 0 never holds more than the tensors of one file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf.errors import TrainingError
from safetensors.torch import save_file
from torch import Tensor

NAME = "model.safetensors"


def plan_files(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Tensor names per file, in order; a file holds at most ``limit`` bytes, or one larger tensor."""
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def write_weights(path: Path, weights: Iterator[tuple[str, Tensor]], sizes: Mapping[str, int], limit: int) -> None:
    """``weights``, in the order of ``sizes`` ({name: bytes}), as safetensors files; several with an index."""
    plan = plan_files(sizes, limit)
    count = len(plan)
    names = [NAME] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    weight_map: dict[str, str] = {}
    for file, wanted in zip(names, plan, strict=True):
        held: dict[str, Tensor] = {}
        for expected in wanted:
            name, tensor = next(weights)
            if name != expected:
                raise TrainingError(f"the export expected the weight {expected!r} and was given {name!r}")
            held[name] = tensor.detach().contiguous().cpu()
        save_file(held, path / file, metadata={"format": "pt"})
        (path / file).chmod(0o644)
        weight_map |= dict.fromkeys(held, file)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / f"{NAME}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
