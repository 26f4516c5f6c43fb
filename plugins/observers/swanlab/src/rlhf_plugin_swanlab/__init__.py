"""Observer: SwanLab."""

from rlhf import hookimpl
from rlhf.interfaces import Observer


@hookimpl
def rlhf_register_observer() -> list[type[Observer]]:
    from rlhf_plugin_swanlab.observer import SwanLabObserver

    return [SwanLabObserver]
