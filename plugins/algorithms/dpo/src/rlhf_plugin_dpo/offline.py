"""Direct preference optimisation on given pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_algorithms.pair_learning import PairLearning

from rlhf_plugin_dpo.pairwise import Pairwise

if TYPE_CHECKING:
    from rlhf.ops.batch import Batch
    from rlhf.types.examples import Example


class DPO(Pairwise, PairLearning):
    """Prefer the chosen answers of given pairs, measured against a reference: no reward model, no samples.

    One optimizer step per step, over all its pairs. A pair of which a side has no token to train on is left out and
    counted (``pairs/left_out``): its log-ratio would be 0 whatever the policy does.
    """

    name = "dpo"
    source = "Rafailov et al. 2023, Direct preference optimization, arXiv:2305.18290"

    def assemble(self, examples: Sequence[Example]) -> Batch | None:  # type: ignore[override]
        return self.counted(super().assemble(examples))
