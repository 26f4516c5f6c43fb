"""Plugins: found in metadata, imported only when selected, and used as plain typed classes.

    plugins = Plugins.discover()
    plugins.list("reward")                                   # nothing imported
    math = plugins.resolve("reward", "math")                 # imported and checked
    reward = math.cls(math.cls.Config())

A run makes one ``Plugins`` object and passes it on; there is no global registry. A user selects a plugin with a
reference (:mod:`rlhf.plugins.references`), in the same way for every kind. Nothing here imports torch.
"""

from rlhf.plugins.entry import Entry
from rlhf.plugins.references import Reference, parse_reference
from rlhf.plugins.registry import Plugins
from rlhf.plugins.resolved import Resolved

__all__ = ["Entry", "Plugins", "Reference", "Resolved", "parse_reference"]
