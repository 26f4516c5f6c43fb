"""Options of every launcher that runs ranks and engines in worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from rlhf.interfaces.component import ComponentConfig

Seconds = Annotated[float, Field(gt=0)]


class WorkerOptions(ComponentConfig):
    start_timeout: Seconds = 600.0
    """Seconds to wait for free devices, and for a role or the engines to become ready."""
    heartbeat: Seconds = 30.0
    """Seconds between two checks of a worker that the driver is waiting for. A worker that does not respond for ten
    heartbeats is stalled."""
    stall_timeout: Seconds = 1800.0
    """Seconds without progress after which a responding worker is stalled. Progress is a call that begins or ends, a
    yielded item, or a finished sample."""
    max_restarts: Annotated[int, Field(ge=0)] | None = None
    """Largest number of dead engines that are replaced within an hour. The next death ends the run. Default: the number
    of engines, but at least 3. Trainers are never replaced."""
    reports: str | None = None
    """Folder for reports about stalls; if absent, the run's folder."""
    show_output: bool = False
    """Show the output of workers, each line with the worker's name. The output is always in a log, and the message
    about a dead worker ends with its last lines."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Environment variables of every worker, e.g. {NCCL_SOCKET_IFNAME = "eth0"}."""

    @field_validator("env")
    @classmethod
    def _is_an_environment(cls, env: Mapping[str, str]) -> Mapping[str, str]:
        for name, value in env.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(
                    f"{name!r} = {value!r} is not a valid environment variable: the name must not be empty or "
                    "contain '=', and neither name nor value may contain a null character"
                )
        return env

    @model_validator(mode="after")
    def _progress_is_checked(self) -> WorkerOptions:
        if self.heartbeat >= self.stall_timeout:
            raise ValueError(
                f"heartbeat = {self.heartbeat:g} must be shorter than stall_timeout = {self.stall_timeout:g}: progress "
                "is checked once per heartbeat"
            )
        return self
