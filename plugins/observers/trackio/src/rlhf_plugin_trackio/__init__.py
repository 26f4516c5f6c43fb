"""Observer: Trackio."""

from rlhf import hookimpl
from rlhf.interfaces import Observer


@hookimpl
def rlhf_register_observer() -> list[type[Observer]]:
    from rlhf_plugin_trackio.observer import TrackioObserver

    return [TrackioObserver]
