"""What torchrun tells each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)
"""Variables of the processes that torchrun started. Workers do not get them: their libraries would read them."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of torchrun."""

    rank: int
    size: int
    """Number of processes."""
    machine: int
    """Number of its machine."""
    local_rank: int
    local_size: int
    """Number of processes on its machine."""
    driver: str
    """Host name or address of rank 0, which drives the run."""

    @property
    def one_machine(self) -> bool:
        return self.size == self.local_size


def member(environment: Mapping[str, str]) -> Member:
    """Raises ConfigError in a process that torchrun did not start."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        raise ConfigError(
            "launcher 'torchrun': torchrun did not start this process. Start on each machine: torchrun --nnodes N "
            "--node-rank I --master-addr HOST --no-python rlhf train run.toml --launcher.use torchrun. I counts the "
            "machines from 0, and HOST is machine 0. Or use --launcher.use processes on one machine."
        )
    return Member(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        machine=int(environment["GROUP_RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_size=int(environment["LOCAL_WORLD_SIZE"]),
        driver=environment["MASTER_ADDR"],
    )


def store() -> Store:
    """The store of this start of torchrun, which all its processes reach. torchrun itself serves it."""
    from torch.distributed.rendezvous import rendezvous

    shared_store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=60))))
    return shared_store
