"""The batch of a step, as the algorithm assembles it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf.errors import PluginInvalid, brief
from rlhf.interfaces import Algorithm
from rlhf.ops.batch import Batch
from rlhf.types import Group
from rlhf.types.examples import Example


def assemble(
    algorithm: Algorithm, examples: Sequence[Group] | Sequence[Example]
) -> tuple[Batch | None, dict[str, float]]:
    """What ``algorithm.assemble(examples)`` returns. Raises PluginInvalid if that is not (batch or None, metrics)."""
    match algorithm.assemble(examples):
        case (Batch() | None as batch, Mapping() as metrics):
            _require_images(algorithm, examples, batch)
            return batch, dict(metrics)
        case other:
            raise PluginInvalid(
                f"assemble() of algorithm {algorithm.name!r} returned {brief(other)}. It must return a tuple of two: "
                "the batch, None if there is nothing to learn from, and a dictionary of metrics. Without metrics write "
                "`return batch, {}`."
            )


def _require_images(algorithm: Algorithm, examples: Sequence[Group] | Sequence[Example], batch: Batch | None) -> None:
    """Refuse a batch that lacks images of its examples. A model would read the placeholder tokens of images as
    words."""
    rows = [e for e in examples if isinstance(e, Example)]
    if batch is not None and not batch.images_B and rows and all(s.images for e in rows for s in e.sequences):
        raise PluginInvalid(
            f"assemble() of algorithm {algorithm.name!r} left out the images of its examples. Pass Sequence.images on: "
            "SequenceData(s.ids, {...}, s.role, s.images)."
        )
