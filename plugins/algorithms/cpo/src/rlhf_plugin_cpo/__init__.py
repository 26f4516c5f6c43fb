"""CPO: the log-prob of an answer is its reward, and chosen answers are imitated; no reference model."""

from __future__ import annotations

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss, Slot
from rlhf_algorithms.pair_learning import PairLearning

from rlhf_plugin_cpo.loss import CPOLoss

__all__ = ["CPO", "CPOLoss"]


class CPO(PairLearning):
    """Raise the chosen answer's log-prob above the rejected one's, and imitate the chosen one.

    One optimizer step per step, over all its pairs. A pair in which an answer has no token is left out
    and counted.
    """

    name = "cpo"
    source = "Xu et al. 2024, arXiv:2401.08417"
    slots = {"loss": Slot("loss", "cpo")}


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [CPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [CPOLoss]
