"""A sharded trainer's state on disk: one safetensors file per rank. Any number of ranks in any stage can read it.

A file holds 1-D pieces, ``<kind>/<parameter>``: elements ``start`` to ``start + numel`` of the flattened parameter, or
of the rank's flattened part of it (``tensor_parallel``). Kinds are ``weight``, ``average`` and those of the optimizer,
such as ``optimizer.exp_avg``. The metadata has the start and the part of each piece, and the optimizer's scalars. When
loading, a rank reads only the elements that it owns. A parameter that was saved in a different number of parts is
assembled first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf.errors import CheckpointError
from rlhf.saved import refuse
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_modeling.sharded.partition import Flat, Partition, Piece, Split
from rlhf_modeling.state import not_finite

WEIGHT, AVERAGE, OPTIMIZER = "weight", "average", "optimizer."
_FACTS = "facts"
"""The only key of the metadata: safetensors writes several keys in random order, but equal runs should write equal
files."""


def file_name(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def local_pieces(partition: Partition, split: Split) -> list[tuple[int, Piece]]:
    """(index of the flat, piece) for everything that this rank writes: its pieces, or its share of elements that every
    replica holds. The first rank of a replica writes parameters that are whole on all of its ranks."""
    replica, replicas = split.topology.replica, split.topology.replicas
    shares = []
    for index, flat in enumerate(partition.flats):
        for piece in flat.pieces:
            if partition.replicated:
                low, high = piece.numel * replica // replicas, piece.numel * (replica + 1) // replicas
                piece = Piece(piece.name, low, low, high - low)
            if piece.numel and split.counts(piece.name):
                shares.append((index, piece))
    return shares


def write(
    path: Path,
    pieces: list[tuple[int, Piece]],
    kinds: Mapping[str, Mapping[int, Tensor]],
    scalars: Mapping[str, Mapping[int, float]],
    split: Split,
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
    topology = split.topology
    divided = {
        p.name: (dim, topology.part, topology.parts) for _, p in pieces if (dim := split.dim(p.name)) is not None
    }
    facts = {
        "start": {piece.name: piece.start for _, piece in pieces},
        "divided": divided,
        "scalars": {key: {p.name: by_flat[i] for i, p in pieces if i in by_flat} for key, by_flat in scalars.items()},
    }
    save_file(tensors, path / file_name(rank, ranks), {_FACTS: json.dumps(facts)})


@dataclass(slots=True)
class _Stored:
    start: int
    numel: int
    file: Path
    part: int
    """Number of the part, if the parameter was divided (``tensor_parallel``)."""


class RankFiles:
    """The files of all ranks of a saved run, opened for reading slices.

    Args:
        shapes: {parameter: shape of the whole tensor} of the reading model.
        split: the division that says which part the reading rank holds.
    """

    def __init__(self, path: Path, ranks: int, shapes: Mapping[str, torch.Size], split: Split) -> None:
        self.path, self.shapes, self.split = path, shapes, split
        self._files: dict[Path, Any] = {}
        self._stored: dict[str, list[_Stored]] = {}
        self._scalars: dict[str, dict[str, float]] = {}
        self._dims: dict[str, tuple[int, int]] = {}
        """{divided parameter: (dimension, parts)}, as it was saved."""
        for rank in range(ranks):
            file = path / file_name(rank, ranks)
            try:
                opened = safe_open(file, framework="pt")
                facts = json.loads((opened.metadata() or {})[_FACTS])
                starts, scalars, divided = facts["start"], facts["scalars"], facts["divided"]
                for key in opened.keys():  # noqa: SIM118 - not a mapping
                    name = key.partition("/")[2]
                    dim, part, parts = divided.get(name, (0, 0, 1))
                    if parts > 1:
                        self._dims[name] = dim, parts
                    stored = _Stored(starts[name], opened.get_slice(key).get_shape()[0], file, part)
                    self._stored.setdefault(key, []).append(stored)
            except (OSError, SafetensorError, KeyError, ValueError) as cause:
                raise CheckpointError(
                    f"cannot read {str(file)!r} ({type(cause).__name__}: {cause}). The checkpoint was saved by {ranks} "
                    "ranks, and all their files must be present and complete."
                ) from cause
            self._files[file] = opened
            for key, values in scalars.items():
                if wrong := [name for name, value in values.items() if not math.isfinite(value)]:
                    refuse(file, f"{key} of {wrong[0]}: {values[wrong[0]]}.")
                self._scalars.setdefault(key, {}).update(values)

    def kinds(self) -> set[str]:
        return {key.partition("/")[0] for key in self._stored}

    def scalars(self) -> Mapping[str, Mapping[str, float]]:
        """{key: {parameter: value}}."""
        return self._scalars

    def check(self, kind: str) -> None:
        """Raises CheckpointError, naming the parameter, unless every element of every parameter is saved exactly
        once."""
        names = {key.partition("/")[2] for key in self._stored if key.partition("/")[0] == kind}
        if names != self.shapes.keys():
            missing, unknown = sorted(self.shapes.keys() - names), sorted(names - self.shapes.keys())
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} is of another model: missing {missing[:3] or 'nothing'}, unknown "
                f"{unknown[:3] or 'nothing'}"
            )
        for name, shape in self.shapes.items():
            parts = self._dims.get(name, (0, 1))[1]
            for part in range(parts):
                self._check_part(kind, name, part, shape.numel() // parts)

    def _check_part(self, kind: str, name: str, part: int, size: int) -> None:
        stored = sorted((s for s in self._stored[f"{kind}/{name}"] if s.part == part), key=lambda s: s.start)
        ends = [0]
        for segment in stored:
            if segment.start != ends[-1]:
                break
            ends.append(segment.start + segment.numel)
        if len(ends) != len(stored) + 1 or ends[-1] != size:
            files = ", ".join(sorted({s.file.name for s in stored})) or "no file"
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r} does not have each of the {size} elements of {name!r} ({kind}) "
                f"exactly once. Saved elements: {[(s.start, s.start + s.numel) for s in stored]} in {files}"
            )

    def has(self, kind: str, name: str) -> bool:
        return f"{kind}/{name}" in self._stored

    @torch.no_grad()
    def restore(self, kind: str, flats: Iterable[Flat], targets: Iterable[Tensor]) -> None:
        """Fill ``targets`` (one [n] per flat) with the elements of its pieces."""
        for flat, target in zip(flats, targets, strict=True):
            for piece in flat.pieces:
                if self.has(kind, piece.name):
                    self._fill(kind, piece, target[piece.offset : piece.offset + piece.numel])

    def _fill(self, kind: str, piece: Piece, target: Tensor) -> None:
        """Copy the piece's elements into ``target`` [numel]."""
        key, dim, topology = f"{kind}/{piece.name}", self.split.dim(piece.name), self.split.topology
        division = None if dim is None else (dim, topology.parts)
        if division == self._dims.get(piece.name):
            self._read(key, 0 if dim is None else topology.part, piece.start, target)
        else:
            part = self.split.local_part(piece.name, self._assemble(key)).reshape(-1)
            target.copy_(part[piece.start : piece.start + piece.numel])

    def _assemble(self, key: str) -> Tensor:
        """The whole parameter, assembled from its saved parts."""
        name = key.partition("/")[2]
        dim, parts = self._dims.get(name, (0, 1))
        shape = list(self.shapes[name])
        shape[dim] //= parts
        tensors = [torch.empty(torch.Size(shape)) for _ in range(parts)]
        for part, target in enumerate(tensors):
            self._read(key, part, 0, target.view(-1))
        return torch.cat(tensors, dim)

    def _read(self, key: str, part: int, start: int, target: Tensor) -> None:
        """Read elements of a part, from ``start`` on, into ``target`` [n]."""
        end = start + target.numel()
        for stored in self._stored[key]:
            low, high = max(start, stored.start), min(end, stored.start + stored.numel)
            if stored.part == part and low < high:
                try:
                    values = self._files[stored.file].get_slice(key)[low - stored.start : high - stored.start]
                except (SafetensorError, OSError) as cause:
                    raise CheckpointError(f"cannot read {key!r} of {str(stored.file)!r}: {cause}") from cause
                if problem := not_finite(values):
                    refuse(stored.file, f"{key}: {problem}.")
                target[low - start : high - start].copy_(values)
