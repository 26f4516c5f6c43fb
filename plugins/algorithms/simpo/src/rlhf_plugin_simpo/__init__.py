"""SimPO: the mean log-prob of an answer is its reward; no reference model."""

from __future__ import annotations

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf_algorithms.pair_learning import PairLearning

from rlhf_plugin_simpo.loss import SimPOLoss

__all__ = ["SimPO", "SimPOLoss"]


class SimPO(PairLearning):
    """Raise the chosen answer's mean log-prob above the rejected one's by a target margin.

    One optimizer step per step, over all its pairs. A pair in which an answer has no token is left out
    and counted.
    """

    name = "simpo"
    source = "Meng et al. 2024, arXiv:2405.14734"
    slots = {"loss": Slot("loss", "simpo")}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [SimPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [SimPOLoss]
