"""Direct preference optimisation and its relatives, on given pairs and on pairs of the policy's own samples."""

from __future__ import annotations

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss

from rlhf_plugin_dpo.algorithms import DPO, OnlineDPO
from rlhf_plugin_dpo.loss import DPOLoss


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [DPO, OnlineDPO]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [DPOLoss]
