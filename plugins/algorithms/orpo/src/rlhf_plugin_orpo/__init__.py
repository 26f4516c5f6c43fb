"""ORPO: supervised fine-tuning on chosen answers plus their odds against the rejected ones; no reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf.types import Needs, RoleSpec, Update

from rlhf_plugin_orpo.loss import TEXT_MASK, ORPOLoss

if TYPE_CHECKING:
    from rlhf.data.rows import Example
    from rlhf.ops.batch import Batch

__all__ = ["ORPO", "TEXT_MASK", "ORPOLoss"]


class ORPO(Algorithm):
    """Maximise the likelihood of chosen answers, and their odds against those of the rejected ones.

    One optimizer step per step, over all its pairs. A pair in which an answer has no token is left out
    and counted.
    """

    name = "orpo"
    source = "Hong et al. 2024, arXiv:2403.07691"
    data = "pairs"
    _left_out = 0
    slots = {"loss": Slot("loss", "orpo")}

    def needs(self) -> Needs:
        return Needs((RoleSpec("policy", trained=True),))

    def assemble(self, examples: Sequence[Example]) -> Batch | None:  # type: ignore[override]
        from rlhf.ops.pairs import pack_pairs

        batch = pack_pairs(examples)
        self._left_out = len(examples) - (batch.units if batch is not None else 0)
        if batch is None or all(r.over != TEXT_MASK for r in self.parts["loss"].reduce().values()):
            return batch
        text_N = (batch.position_N > 0) & (batch.role_B == 0)[batch.seq_N]
        return batch.with_column("tok", TEXT_MASK, batch.tok["loss_mask"] | text_N, over=None)

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return batch, {"pairs/left_out": float(self._left_out)} if self._left_out else {}

    def updates(self, step: int) -> list[Update]:  # type: ignore[override]
        return [Update("policy", "loss")]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [ORPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [ORPOLoss]
