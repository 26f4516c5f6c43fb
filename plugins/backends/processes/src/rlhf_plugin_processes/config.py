"""Options of the launcher ``processes``: the run file's ``[launcher]`` section."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from rlhf_workers.options import WorkerOptions


class ProcessesConfig(WorkerOptions):
    cpus: Annotated[int, Field(ge=1)] | None = None
    """Number of CPU cores that ranks and engines may be placed on, where this machine has no GPUs; where absent, those
    that this process may use."""
