"""Base of the algorithms that learn from given pairs: a subclass names its loss, and what else it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.interfaces.algorithm import Algorithm
from rlhf.types import Needs, RoleSpec, Snapshot, Update

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


class PairLearning(Algorithm):
    """One optimizer step per step, over all its pairs, with the loss in the slot ``loss``. Complete example::

        class Mine(PairLearning):
            name = "mine"
            slots = {"loss": Slot("loss", "mine")}

    A unit is a pair: sequences of role 0 (chosen) and 1 (rejected). Where ``data.margin`` names a column, a loss that
    has ``margin`` among its ``columns()`` reads it, one number a pair. A pair in which an answer has no token to train
    on is left out and counted (``pairs/left_out``): its log-prob would be 0 whatever the policy does.
    """

    data = "pairs"
    _left_out = 0

    def needs(self) -> Needs:
        """The policy alone; override it for a reference, and ``annotations`` with it."""
        return Needs((RoleSpec("policy", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> Batch | None:  # type: ignore[override]
        """:func:`rlhf.ops.pairs.pack_pairs`; None where no pair is left."""
        from rlhf.ops.pairs import pack_pairs

        batch = pack_pairs(examples)
        self._left_out = len(examples) - (batch.units if batch is not None else 0)
        return batch

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Nothing to compute: reports how many pairs were left out."""
        return batch, {"pairs/left_out": float(self._left_out)} if self._left_out else {}

    def updates(self, step: int) -> list[Update | Snapshot]:
        """One optimizer step of the policy on all pairs."""
        return [Update("policy", "loss")]
