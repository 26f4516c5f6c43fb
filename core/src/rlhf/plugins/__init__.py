"""Plugins: found in metadata, imported only when selected, and then plain typed classes.

    plugins = Plugins.discover()
    plugins.list("reward")                                   # nothing imported
    math = plugins.resolve("reward", "math")                 # imported and checked
    reward = math.cls(math.cls.Config())

``Plugins`` is a value: a run makes one and passes it down; there is no global registry. What a user writes to select
a plugin is a reference (:mod:`rlhf.plugins.references`), the same for every kind. Nothing here imports torch.
"""

import rlhf.plugins.pickling  # noqa: F401 - so that plugins pickle
from rlhf.plugins.entry import Entry
from rlhf.plugins.references import Reference, parse_reference
from rlhf.plugins.registry import Plugins
from rlhf.plugins.requirements import check_requirements
from rlhf.plugins.resolved import Resolved

__all__ = ["Entry", "Plugins", "Reference", "Resolved", "check_requirements", "parse_reference"]
