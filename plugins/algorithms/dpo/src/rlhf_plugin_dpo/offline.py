"""Direct preference optimisation on given pairs."""

from __future__ import annotations

from rlhf_algorithms.pair_learning import PairLearning

from rlhf_plugin_dpo.pairwise import Pairwise


class DPO(Pairwise, PairLearning):
    """Prefer the chosen answers of given pairs, measured against a reference. There is no reward model and no sampling.

    One optimizer step in every step of the run, on all its pairs. A pair in which an answer has no token to train on is
    left out and counted (metric ``pairs/left_out``): its log-ratio would be 0 for every policy.
    """

    name = "dpo"
    source = "Rafailov et al. 2023, Direct preference optimization, arXiv:2305.18290"
