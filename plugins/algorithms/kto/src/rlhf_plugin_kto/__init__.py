"""KTO: learn from single answers that are desirable or undesirable."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm, Loss

from rlhf_plugin_kto.algorithm import KTO, KTOPair
from rlhf_plugin_kto.loss import KTOLoss

__all__ = ["KTO", "KTOLoss", "KTOPair"]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [KTO, KTOPair]


@hookimpl
def rlhf_register_loss() -> list[type[Loss]]:
    return [KTOLoss]
