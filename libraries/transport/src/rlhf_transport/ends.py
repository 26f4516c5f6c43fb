"""The ends of a link, by its kind."""

from __future__ import annotations

import torch

from rlhf_transport.broadcast import BroadcastInlet, BroadcastOutlet, Silent
from rlhf_transport.link import Inlet, Link, Outlet
from rlhf_transport.shared_memory import SharedInlet, SharedOutlet


def outlet(link: Link, rank: int) -> Outlet:
    """The end of a trainer's rank. Waits for the other ends where the link needs that."""
    if link.kind == "shared":
        return SharedOutlet(link, rank)
    return BroadcastOutlet(link) if rank == 0 else Silent()


def inlet(link: Link, number: int, device: torch.device) -> Inlet:
    """The end of receiver ``number`` (from 0), which takes tensors on ``device``."""
    if link.kind == "shared":
        return SharedInlet(link, device)
    return BroadcastInlet(link, number, device)
