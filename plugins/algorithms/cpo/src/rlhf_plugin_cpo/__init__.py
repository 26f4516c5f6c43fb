"""CPO: the log-prob of an answer is its reward, and chosen answers are imitated; no reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf.types import Needs, RoleSpec, Update

from rlhf_plugin_cpo.loss import CPOLoss

if TYPE_CHECKING:
    from rlhf.data.rows import Example
    from rlhf.ops.batch import Batch

__all__ = ["CPO", "CPOLoss"]


class CPO(Algorithm):
    """Raise the chosen answer's log-prob above the rejected one's, and imitate the chosen one.

    One optimizer step per step, over all its pairs. A pair in which an answer has no token is left out
    and counted.
    """

    name = "cpo"
    source = "Xu et al. 2024, arXiv:2401.08417"
    data = "pairs"
    _left_out = 0
    slots = {"loss": Slot("loss", "cpo")}

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> Batch | None:  # type: ignore[override]
        from rlhf.ops.pairs import pack_pairs

        batch = pack_pairs(examples)
        self._left_out = len(examples) - (batch.units if batch is not None else 0)
        return batch

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return batch, {"pairs/left_out": float(self._left_out)} if self._left_out else {}

    def updates(self, step: int) -> list[Update]:  # type: ignore[override]
        return [Update("policy", "loss")]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [CPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [CPOLoss]
