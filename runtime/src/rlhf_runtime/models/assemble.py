"""The batch of a step, as the algorithm lays it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf.errors import PluginInvalid, shown
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
            return batch, dict(metrics)
        case other:
            raise PluginInvalid(
                f"assemble() of algorithm {algorithm.name!r} returned {shown(other)}. It must return a tuple of two: "
                "the batch, None if there is nothing to learn from, and a dictionary of metrics. Without metrics write "
                "`return batch, {}`."
            )
