"""An algorithm for each data source: every row is trained on by the algorithm of its source, in one optimizer step."""

from rlhf import hookimpl
from rlhf.interfaces import Algorithm

from rlhf_plugin_per_source.algorithm import Member, PerSource, PerSourceConfig

__all__ = ["Member", "PerSource", "PerSourceConfig"]


@hookimpl
def rlhf_register_algorithm() -> list[type[Algorithm]]:
    return [PerSource]
