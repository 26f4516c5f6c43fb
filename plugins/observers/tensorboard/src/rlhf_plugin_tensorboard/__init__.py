"""Observer: TensorBoard."""

from rlhf import hookimpl
from rlhf.interfaces import Observer


@hookimpl
def rlhf_register_observer() -> list[type[Observer]]:
    from rlhf_plugin_tensorboard.observer import TensorBoardObserver

    return [TensorBoardObserver]
