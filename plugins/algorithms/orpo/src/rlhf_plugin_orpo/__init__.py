"""ORPO: supervised fine-tuning on chosen answers plus their odds against the rejected ones; no reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf_algorithms.pair_learning import PairLearning

from rlhf_plugin_orpo.loss import TEXT_MASK, ORPOLoss

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example

__all__ = ["ORPO", "TEXT_MASK", "ORPOLoss"]


class ORPO(PairLearning):
    """Maximise the likelihood of chosen answers, and their odds against those of the rejected ones.

    One optimizer step per step, over all its pairs. A pair in which an answer has no token is left out
    and counted.
    """

    name = "orpo"
    source = "Hong et al. 2024, arXiv:2403.07691"
    slots = {"loss": Slot("loss", "orpo")}

    def assemble(self, examples: Sequence[Example]) -> tuple[Batch | None, dict[str, float]]:
        batch, metrics = super().assemble(examples)
        if batch is None or all(r.over != TEXT_MASK for r in self.parts["loss"].reduce().values()):
            return batch, metrics
        text_N = (batch.position_N > 0) & (batch.role_B == 0)[batch.seq_N]
        return batch.with_column("tok", TEXT_MASK, batch.tok["loss_mask"] | text_N, over=None), metrics


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [ORPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [ORPOLoss]
