"""Direct preference optimisation and related losses, on pairs of the data and on pairs of the policy's samples."""

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
