"""Options of the launcher ``ray``: the run file's ``[launcher]`` section."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from rlhf.interfaces.component import ComponentConfig

Seconds = Annotated[float, Field(gt=0)]
_PLACE = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")


class RayConfig(ComponentConfig):
    address: str | None = None
    """The Ray cluster: ``auto`` (the one of this machine or job) or ``HOST:PORT``. Where absent: the cluster that
    RAY_ADDRESS names (``ray job submit`` sets it) or this process is connected to already, else a Ray of its own, which
    only this machine can reach and which ends with the run."""
    namespace: str | None = None
    """Ray namespace in which the workers can be found by name (``policy-0``, ``engine-1``), for debugging from
    another process; where absent, they have no names."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How ranks are laid out over nodes: together where they fit (PACK), on as many nodes as there are (SPREAD), all
    on one node (STRICT_PACK), each on a node of its own (STRICT_SPREAD). Roles that share devices move together."""
    start_timeout: Seconds = 600.0
    """For the cluster to give the devices, and for a role or the engines to be ready."""
    heartbeat: Seconds = 30.0
    """Between two questions to a worker that is waited for; one that gives no answer for ten of them is stalled."""
    stall_timeout: Seconds = 1800.0
    """After which a worker that answers, but whose call makes no progress, is stalled: it began nothing, yielded
    nothing and finished no sample."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Engines that may die and be replaced in a run; the next death ends it. Trainers are never replaced."""
    reports: str | None = None
    """Folder for the page about a stall; where absent, the run's folder."""
    show_output: bool = False
    """Show what workers print, line by line with their name. It is in Ray's log folder in any case, and its end is
    part of the message when a worker dies."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of every worker, e.g. {NCCL_SOCKET_IFNAME = "eth0"}."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """CPUs that a Ray of its own gives away; where absent, those of the machine."""
    object_store_gib: Annotated[float, Field(gt=0)] | None = None
    """Shared memory of a Ray of its own for arguments and weights in transit; where absent, Ray's choice."""

    @field_validator("address")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and not _PLACE.fullmatch(value):
            raise ValueError(
                f"{value!r} is no cluster: give 'auto' or HOST:PORT (the port of `ray start --head`, 6379 by default), "
                "or leave it out to start Ray here. The Ray client (ray://) is not supported: start the run on a node "
                "of the cluster, or with `ray job submit`."
            )
        return value

    @model_validator(mode="after")
    def _works_together(self) -> RayConfig:
        own = [name for name in ("cpus", "object_store_gib") if getattr(self, name) is not None]
        if self.address is not None and own:
            raise ValueError(
                f"{' and '.join(own)} is for a Ray that the run starts; address = {self.address!r} names a cluster "
                "that runs already. Leave out one of them."
            )
        if self.heartbeat >= self.stall_timeout:
            raise ValueError(
                f"heartbeat = {self.heartbeat:g} must be shorter than stall_timeout = {self.stall_timeout:g}: progress "
                "is seen once in a heartbeat"
            )
        return self
