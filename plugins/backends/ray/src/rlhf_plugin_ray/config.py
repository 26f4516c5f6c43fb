"""Options of the launcher ``ray``: the run file's ``[launcher]`` section."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator
from rlhf_workers.launcher_options import WorkerOptions

_PLACE = re.compile(r"[^\s:/]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")

TOKEN = (
    "if Ray says InvalidAuthToken, the cluster requires a token: copy ~/.ray/auth_token from its head node if it is "
    "not here, and `export RAY_AUTH_MODE=token`"
)
"""What to do if a cluster answers and refuses this process. Ray sends no token to an address that is named unless the
variable is set."""


class RayConfig(WorkerOptions):
    address: str | None = None
    """The Ray cluster: ``auto`` (the one of this machine or job) or ``HOST:PORT``. If absent: the cluster that
    RAY_ADDRESS names (``ray job submit`` sets it), or to which this process is already connected; otherwise the run
    starts a Ray cluster that only this machine can reach and that ends with the run."""
    namespace: str | None = None
    """Ray namespace that lists the workers by name (``policy-0``, ``engine-1``), for debugging from another process. If
    absent, workers have no names."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """How ranks are placed on nodes: together if they fit (PACK), over as many nodes as possible (SPREAD), all on one
    node (STRICT_PACK), each on a separate node (STRICT_SPREAD). Roles that share devices are placed together."""
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Number of CPUs of a Ray cluster that the run starts; if absent, those of the machine."""
    object_store_gib: Annotated[float, Field(gt=0)] | None = None
    """Shared memory for arguments and weights in transit, of a Ray cluster that the run starts; if absent, Ray's
    default."""

    @field_validator("address")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        if value is not None and value != "auto" and not _PLACE.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a cluster: set 'auto' or HOST:PORT (the port of `ray start --head`, 6379 by "
                "default), or remove the option to start Ray here. The Ray client (ray://) is not supported: start "
                "the run on a node of the cluster, or with `ray job submit`."
            )
        return value

    @model_validator(mode="after")
    def _works_together(self) -> RayConfig:
        start_options = [name for name in ("cpus", "object_store_gib") if getattr(self, name) is not None]
        if self.address is not None and start_options:
            raise ValueError(
                f"{' and '.join(start_options)} can be set only for a Ray that the run starts; "
                f"address = {self.address!r} names a running cluster. Remove one of them."
            )
        return self
