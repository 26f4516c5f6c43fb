"""Base class of the algorithms that learn from given pairs. A subclass names its loss and its further needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.interfaces.algorithm import Algorithm
from rlhf.types import Needs, RoleSpec, Snapshot, Update

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


class PairLearning(Algorithm):
    """One optimizer step per step of the run, on all pairs of the step, with the loss in the slot ``loss``. Complete
    example::

        class Mine(PairLearning):
            name = "mine"
            slots = {"loss": Slot("loss", "mine")}

    A unit is a pair: a sequence of role 0 (chosen) and one of role 1 (rejected). Where ``data.margin`` names a column,
    a loss with ``margin`` among its ``columns()`` reads it, one number per pair. A pair in which an answer has no token
    to train on is left out and counted (metric ``pairs/left_out``): its log-prob would be 0 for every policy.
    """

    data = "pairs"

    def needs(self) -> Needs:
        """The policy only. For a reference, override this method and ``annotations``."""
        return Needs((RoleSpec("policy", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:  # type: ignore[override]
        """See :func:`rlhf_algorithms.pairs.pack_pairs`; and the number of pairs that were left out."""
        from rlhf_algorithms.pairs import pack_pairs

        batch = pack_pairs(examples)
        if batch is None:
            return None, {}
        left_out = len(examples) - batch.units
        return batch, {"pairs/left_out": float(left_out)} if left_out else {}

    def updates(self, step: int, batch: Batch | None = None) -> list[Update | Snapshot]:
        """One optimizer step of the policy on all pairs."""
        return [Update("policy", "loss")]
