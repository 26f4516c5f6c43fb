"""A sharded trainer's state on disk: one safetensors file per rank, read back by any number of ranks in any stage.

A file holds 1-D pieces, ``<kind>/<parameter>``: elements ``start`` to ``start + numel`` of the flattened parameter.
Kinds are ``weight``, ``average`` and the optimizer's, ``optimizer.exp_avg``, ... The metadata says where each piece
starts, and holds the optimizer's scalars. A rank that loads reads the elements that it owns now, from the files where
they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import CheckpointError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_plugin_deepspeed.shards import Flat, Piece

WEIGHT, AVERAGE, OPTIMIZER = "weight", "average", "optimizer."


def file_name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def own(flats: Iterable[Flat], replicated: bool, rank: int, ranks: int) -> list[tuple[int, Piece]]:
    """(index of the flat, piece) that this rank writes: its pieces, or its share of what every rank holds."""
    found = []
    for index, flat in enumerate(flats):
        for piece in flat.pieces:
            if replicated:
                low, high = piece.numel * rank // ranks, piece.numel * (rank + 1) // ranks
                piece = Piece(piece.name, low, low, high - low)
            if piece.numel:
                found.append((index, piece))
    return found


def write(
    path: Path,
    pieces: list[tuple[int, Piece]],
    kinds: Mapping[str, Mapping[int, Tensor]],
    scalars: Mapping[str, Mapping[int, float]],
    rank: int,
    ranks: int,
) -> None:
    """This rank's file. ``kinds``: {kind: {index of the flat: [n]}}; ``scalars`` likewise."""
    tensors = {
        f"{kind}/{piece.name}": by_flat[index][piece.offset : piece.offset + piece.numel].detach().cpu()
        for kind, by_flat in kinds.items()
        for index, piece in pieces
        if index in by_flat
    }
    metadata = {
        "start": json.dumps({piece.name: piece.start for _, piece in pieces}),
        "scalars": json.dumps(
            {key: {p.name: by_flat[i] for i, p in pieces if i in by_flat} for key, by_flat in scalars.items()}
        ),
    }
    save_file(tensors, path / file_name(rank, ranks), metadata)


@dataclass(slots=True)
class _Part:
    start: int
    numel: int
    file: Path


class SavedState:
    """The files of all ranks of a saved run, opened for reading slices."""

    def __init__(self, path: Path, ranks: int) -> None:
        self.path = path
        self._files: dict[Path, Any] = {}
        self._parts: dict[str, list[_Part]] = {}
        self._scalars: dict[str, dict[str, float]] = {}
        for rank in range(ranks):
            file = path / file_name(rank, ranks)
            try:
                opened = safe_open(file, framework="pt")
                metadata = opened.metadata() or {}
                starts, scalars = json.loads(metadata["start"]), json.loads(metadata["scalars"])
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    start = starts[key.partition("/")[2]]
                    self._parts.setdefault(key, []).append(_Part(start, opened.get_slice(key).get_shape()[0], file))
            except (OSError, SafetensorError, KeyError, ValueError) as cause:
                raise CheckpointError(
                    f"cannot read {str(file)!r} ({type(cause).__name__}: {cause}). The checkpoint was saved by {ranks} "
                    "ranks and needs all their files, whole."
                ) from cause
            self._files[file] = opened
            for key, values in scalars.items():
                self._scalars.setdefault(key, {}).update(values)

    def kinds(self) -> set[str]:
        return {key.partition("/")[0] for key in self._parts}

    def scalars(self) -> Mapping[str, Mapping[str, float]]:
        """{key: {parameter: value}}."""
        return self._scalars

    def check(self, kind: str, sizes: Mapping[str, int]) -> None:
        """Every element of every parameter is there, once. Raises CheckpointError naming what is not."""
        there = {key.partition("/")[2] for key in self._parts if key.partition("/")[0] == kind}
        if there != sizes.keys():
            missing, unknown = sorted(sizes.keys() - there), sorted(there - sizes.keys())
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} is of another model: missing {missing[:3] or 'nothing'}, unknown "
                f"{unknown[:3] or 'nothing'}"
            )
        for name, size in sizes.items():
            parts = sorted(self._parts[f"{kind}/{name}"], key=lambda p: p.start)
            ends = [0]
            for part in parts:
                if part.start != ends[-1]:
                    break
                ends.append(part.start + part.numel)
            if len(ends) != len(parts) + 1 or ends[-1] != size:
                files = ", ".join(sorted({p.file.name for p in parts}))
                raise CheckpointError(
                    f"the checkpoint {str(self.path)!r} does not hold the {size} elements of {name!r} ({kind}) once "
                    f"each: {files} hold {[(p.start, p.start + p.numel) for p in parts]}"
                )

    def has(self, kind: str, name: str) -> bool:
        return f"{kind}/{name}" in self._parts

    def fill(self, kind: str, piece: Piece, target: Tensor) -> None:
        """Copy the piece's elements into ``target`` [numel]."""
        end = piece.start + piece.numel
        key = f"{kind}/{piece.name}"
        for part in self._parts[key]:
            low, high = max(piece.start, part.start), min(end, part.start + part.numel)
            if low < high:
                try:
                    values = self._files[part.file].get_slice(key)[low - part.start : high - part.start]
                except (SafetensorError, OSError) as cause:
                    raise CheckpointError(f"cannot read {key!r} of {str(part.file)!r}: {cause}") from cause
                target[low - piece.start : high - piece.start].copy_(values)


@torch.no_grad()
def restore(saved: SavedState, kind: str, flats: Iterable[Flat], targets: Iterable[Tensor]) -> None:
    """Fill ``targets`` (one [n] per flat) with the elements of its pieces."""
    for flat, target in zip(flats, targets, strict=True):
        for piece in flat.pieces:
            if saved.has(kind, piece.name):
                saved.fill(kind, piece, target[piece.offset : piece.offset + piece.numel])
