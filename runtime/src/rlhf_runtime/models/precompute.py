"""Compute a frozen role's outputs for every row once, before the first step: ``[reference] precompute = true``.

Values are stored under a key of their input: the tokens and images of a sequence and the columns that a head reads. So
values depend neither on the order of rows nor on the composition of batches. The role's model is unloaded before any
trained model is loaded.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rlhf.errors import TrainingError
from rlhf.interfaces import Algorithm, ModelSpec, TrainerFacts
from rlhf.ops.batch import Batch
from rlhf.types import Head
from rlhf.types.examples import Example
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_runtime.calls.algorithm_calls import assemble
from rlhf_runtime.checkpoint.atomic_files import publish_file
from rlhf_runtime.models.roles import Role

BATCHES = 8
"""Number of batches whose rows the role computes at once."""

_KEY = 16  # bytes; two of 2^40 sequences share one with a probability of 2^-49


@dataclass
class ValueTable:
    """{key of a sequence: its values, in the order of its tokens}, float32."""

    values: dict[bytes, Tensor] = field(default_factory=dict)

    def add(self, batch: Batch, head: Head, view: str, values: Tensor) -> None:
        """``values``: the head's outputs for the batch, [N] or, for heads of whole sequences, [B]."""
        for key, rows in zip(keys(batch, head, view), _rows(batch, head), strict=True):
            self.values.setdefault(key, values[rows].float().clone())

    def missing(self, batch: Batch, heads: Sequence[tuple[Head, str]]) -> Tensor:
        """bool [B]: sequences for which a value is missing."""
        known_B = torch.ones(batch.sequences, dtype=torch.bool)
        for head, view in heads:
            known_B &= torch.tensor([key in self.values for key in keys(batch, head, view)])
        return ~known_B

    def look_up(self, batch: Batch, head: Head, view: str) -> Tensor | None:
        """The head's values for the batch, [N] or [B]; None if the values of any sequence are missing."""
        values = [self.values.get(key) for key in keys(batch, head, view)]
        return torch.cat(values) if all(f is not None for f in values) else None  # type: ignore[arg-type]

    def save(self, path: Path, model: str) -> None:
        order = list(self.values)
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(order)), dtype=torch.uint8).view(-1, _KEY),
            "sizes": torch.tensor([self.values[key].numel() for key in order]),
            "values": torch.cat([self.values[key] for key in order]),
        }
        publish_file(path, lambda file: save_file(tensors, file, {"model": model}))

    @classmethod
    def load(cls, path: Path, model: str) -> ValueTable:
        """The table that :meth:`save` wrote; empty if there is none, or if it belongs to another model. Raises
        SafetensorError for a damaged file."""
        if not path.is_file():
            return cls()
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get("model") != model:
                return cls()
            all_keys: bytes = file.get_tensor("keys").numpy().tobytes()
            parts = file.get_tensor("values").split(file.get_tensor("sizes").tolist())
        return cls({all_keys[i * _KEY : (i + 1) * _KEY]: part for i, part in enumerate(parts)})


class PrecomputedRole(Role):
    """A role without a model. It reads its outputs from a table."""

    def __init__(self, spec: ModelSpec, table: ValueTable) -> None:
        self.spec, self.view, self.table = spec, "live", table
        self.facts = TrainerFacts()

    def forward(self, batch: Batch, heads: Sequence[Head], view: str = "live") -> dict[str, Tensor]:
        outputs = {head.name: self.table.look_up(batch, head, view) for head in heads}
        unknown = [name for name, values in outputs.items() if values is None]
        if unknown:
            raise TrainingError(
                f"role {self.name!r} was precomputed, but a batch holds sequences whose {unknown[0]!r} is missing: the "
                f"algorithm reads it at other tokens than in the first step. Remove precompute of {self.name!r}."
            )
        return {name: values for name, values in outputs.items() if values is not None}


def precompute(
    spec: ModelSpec,
    path: Path,
    algorithm: Algorithm,
    examples: Callable[[], Iterable[Sequence[Example]]],
    launch: Callable[[], Role],
    note: Callable[[str], None],
    writing: Callable[[Path], AbstractContextManager[None]] = lambda path: nullcontext(),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> PrecomputedRole:
    """Compute the role's annotations of all examples. Values that ``path`` contains from before a resume are not
    computed again.

    Args:
        examples: every row that the run may use. Each list is assembled into one batch.
        launch: loads the role's model; called only if values are missing.
        writing: context in which ``path`` is written; turns a full disk into the run's own error.
        options: the options of the role's trainer that may change its outputs.
    """
    model = identity(spec, options)
    try:
        table = ValueTable.load(path, model)
    except SafetensorError as error:  # after an incomplete copy, or a loss of power
        note(f"{path} is damaged ({error}), so it is computed again")
        table = ValueTable()
    # Step 0 stands for every step. A later step that reads other tokens is refused by PrecomputedRole.forward().
    annotations = [a for a in algorithm.annotations(0) if a.role == spec.role.name]

    def batches() -> Iterator[Batch]:
        assembled = (assemble(algorithm, part)[0] for part in examples())
        return (batch for batch in assembled if batch is not None)

    heads = [(Role.head_of(spec, a.output), a.view) for a in annotations]
    old_keys = set(table.values)
    total = len({key for batch in batches() for head, view in heads for key in keys(batch, head, view)} - old_keys)
    if total:
        role = launch()
        last_tenth = 0
        note(f"{role.name}: precomputing {', '.join(a.column for a in annotations)} of {total // len(heads)} sequences")
        for batch in batches():
            missing_B = table.missing(batch, heads)
            if not bool(missing_B.any()):
                continue
            new = batch.keep(missing_B)
            for view in dict.fromkeys(view for _, view in heads):
                view_heads = [head for head, head_view in heads if head_view == view]
                for head, values in zip(view_heads, role.forward(new, view_heads, view).values(), strict=True):
                    table.add(new, head, view, values)
            new_values = len(table.values) - len(old_keys)
            if new_values * 10 // total > last_tenth:
                last_tenth = new_values * 10 // total
                with writing(path):
                    table.save(path, model)  # a run that is stopped here continues from this file
                note(f"{role.name}: {new_values // len(heads)} of {total // len(heads)} sequences precomputed")
        role.group.shutdown()
        del role
        gc.collect()  # a module and its hooks refer to each other
    return PrecomputedRole(spec, table)


def keys(batch: Batch, head: Head, view: str) -> list[bytes]:
    """[B]: for each sequence, a key of everything that determines the head's values."""
    columns = [batch.ids_N]
    # Trainers divide logits by the temperature of each token, so log-probs depend on it.
    names = [n for n in ("temperature", head.over, *head.columns) if n in batch.tok]
    columns += [batch.tok[name] for name in names]
    start = repr((head.name, head.over, head.position, view, names)).encode()
    lens = batch.lens_B.tolist()
    digests = [hashlib.blake2b(start, digest_size=_KEY) for _ in lens]
    for column in columns:
        for digest, part in zip(digests, column.split(lens), strict=True):
            digest.update(part.contiguous().numpy().tobytes())
    for digest, images in zip(digests, batch.images_B or ((),) * len(lens), strict=True):
        for image in images:
            digest.update(image.data)
    return [digest.digest() for digest in digests]


def identity(spec: ModelSpec, options: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Identity of a model and its arithmetic: its path and, for a folder, the sizes and times of its files. ``options``
    are those of :func:`precompute`."""
    folder = Path(spec.path).expanduser()
    # *config.json: also the settings of an adapter
    files = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*config.json")) if folder.is_dir() else []
    stats = [(f.name, (s := f.stat()).st_size, s.st_mtime_ns) for f in files]
    arithmetic = (spec.dtype, spec.storage, spec.on_processor, sorted(options.items()))
    return hashlib.sha256(repr((spec.path, spec.role.head, arithmetic, stats)).encode()).hexdigest()


def _rows(batch: Batch, head: Head) -> list[slice]:
    """Positions of each sequence's values in the head's output."""
    if head.over == "last_token":
        return [slice(b, b + 1) for b in range(batch.sequences)]
    ends = torch.cumsum(batch.lens_B, 0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, batch.lens_B.tolist(), strict=True)]


def problems_of(
    names: Iterable[str], algorithm: Algorithm, trained: Collection[str], snapshots: Collection[str]
) -> list[str]:
    """Why these roles cannot be precomputed."""
    problems = []
    for name in names:
        annotations = [a for a in algorithm.annotations(0) if a.role == name]
        columns = [a.column for a in annotations if not a.per_row]
        if algorithm.data == "prompts":
            reason = f"{algorithm.name} learns from samples that do not exist before the run"
        elif name in trained:
            reason = f"{algorithm.name} trains it"
        elif name in snapshots:
            reason = f"{algorithm.name} replaces its weights during the run"
        elif not annotations:
            reason = f"{algorithm.name} reads none of its outputs before an update"
        elif columns:
            reason = f"{algorithm.name} computes {columns[0]!r} on combinations of rows, which differ from step to step"
        else:
            continue
        problems.append(f"{name}.precompute = true, but {reason}. Remove it.")
    return problems
