"""Options of ``per_source``: the members, their sources and weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field, model_validator
from rlhf.interfaces import ComponentConfig

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TAKEN = ("policy", "loss")
"""Words at the start of names of metrics, which a member's name would hide."""


class Member(ComponentConfig):
    use: str
    """The algorithm. Its options and slots stand in the same table: ``kl.coef = 0.05``, ``loss = { use = "gspo" }``."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Names of the sources in ``data.train`` whose rows it trains on."""
    weight: float = Field(default=1.0, gt=0)
    """Factor of its loss in the sum."""


class PerSourceConfig(ComponentConfig):
    members: Mapping[str, Member] = Field(min_length=1)
    """The algorithms, by names of your choice, which are also the prefixes of their metrics."""

    @model_validator(mode="after")
    def _check(self) -> PerSourceConfig:
        owner: dict[str, str] = {}
        for name, member in self.members.items():
            if not _NAME.fullmatch(name) or name in _TAKEN:
                raise ValueError(
                    f"members: the name {name!r} is not allowed; a name matches [a-z][a-z0-9_]* and is not "
                    f"{' or '.join(_TAKEN)}"
                )
            for source in member.sources:
                if source in owner:
                    twice = f"both {owner[source]!r} and {name!r}" if owner[source] != name else f"{name!r} twice"
                    raise ValueError(
                        f"members: the source {source!r} is named by {twice}; a source has one member. Remove one"
                    )
                owner[source] = name
        return self
