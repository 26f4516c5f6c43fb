"""Direct preference optimisation on given pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf.ops.pairs import pack_pairs

from rlhf_plugin_dpo.pairwise import Pairwise

if TYPE_CHECKING:
    from rlhf.data.rows import Example
    from rlhf.ops.batch import Batch


class DPO(Pairwise):
    """Prefer the chosen answers of given pairs, measured against a reference: no reward model, no samples.

    One optimizer step per step, over all its pairs. A pair of which a side has no token to train on is left out and
    counted (``pairs/left_out``): its log-ratio would be 0 whatever the policy does.
    """

    name = "dpo"
    source = "Rafailov et al. 2023, Direct preference optimization, arXiv:2305.18290"
    data = "pairs"
    _left_out = 0

    def assemble(self, examples: Sequence[Example]) -> Batch | None:  # type: ignore[override]
        batch = pack_pairs(examples)
        self._left_out = len(examples) - (batch.units if batch is not None else 0)
        return self.counted(batch)

    def credit(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return batch, {"pairs/left_out": float(self._left_out)} if self._left_out else {}
